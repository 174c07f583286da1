"""The record of policy RL: one rollout, tokens in, tokens out, nothing re-tokenised."""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec

from rlcore.records.trace import Sampling
from rlcore.records.wire import RecordError

NOT_SAMPLED = -1
"""Policy version of a token that the policy did not sample."""


class Rollout(msgspec.Struct, frozen=True, kw_only=True):
    """One episode of one task. The three streams are as long as ``token_ids``."""

    rollout_id: str
    task_id: str
    group_id: str
    """Rollouts of the same task that are compared with each other."""
    token_ids: list[int]
    """The prompt, and everything that was sampled or said to the policy after it."""
    prompt_length: int
    loss_mask: list[bool]
    """True where the policy sampled the token."""
    logprobs: list[float]
    """Inference log-probability under ``sampling``; 0.0 where nothing was sampled."""
    policy_versions: list[int]
    """The policy version that sampled the token; NOT_SAMPLED elsewhere."""
    sampling: Sampling
    draft_version: int
    finish_reason: str
    """``stop``, ``length``, ``turns``, or why the episode ended early."""
    reward: float
    reward_parts: dict[str, float] = {}
    correct: bool = False
    tenant: str = "default"

    @property
    def sampled(self) -> int:
        """Tokens that the policy sampled."""
        return sum(self.loss_mask)

    @property
    def oldest_version(self) -> int:
        """The oldest policy version in it; NOT_SAMPLED when nothing was sampled."""
        return min(
            (v for v in self.policy_versions if v != NOT_SAMPLED),
            default=NOT_SAMPLED,
        )

    @property
    def newest_version(self) -> int:
        return max(self.policy_versions, default=NOT_SAMPLED)


def equal_rewards(group: Sequence[Rollout]) -> bool:
    """Whether nothing can be learned from comparing these rollouts."""
    return len({rollout.reward for rollout in group}) == 1


def check_rollout(rollout: Rollout) -> Rollout:
    """The relations inside a rollout that its schema cannot hold; raises RecordError."""
    n = len(rollout.token_ids)
    streams = (rollout.loss_mask, rollout.logprobs, rollout.policy_versions)
    if any(len(stream) != n for stream in streams):
        raise RecordError("rollout", f"{n} tokens, streams of {[len(s) for s in streams]}")
    if not 0 < rollout.prompt_length <= n or any(rollout.loss_mask[: rollout.prompt_length]):
        raise RecordError("rollout", f"prompt of {rollout.prompt_length} in {n} tokens")
    for i, sampled in enumerate(rollout.loss_mask):
        if sampled != (rollout.policy_versions[i] != NOT_SAMPLED):
            raise RecordError("rollout", f"token {i}: the mask and the version disagree")
        if sampled and not (math.isfinite(rollout.logprobs[i]) and rollout.logprobs[i] <= 0.0):
            raise RecordError("rollout", f"token {i}: log-probability {rollout.logprobs[i]}")
    if not math.isfinite(rollout.reward):
        raise RecordError("reward", f"reward {rollout.reward}")
    return rollout
