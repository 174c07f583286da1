"""One episode: a task is opened, the policy and its environment take turns, the end is scored.

The conversation is token ids throughout. What the policy sampled stays as it was sampled; only what the
environment says is tokenised, once.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

from rlcore.environments.base import Task
from rlcore.environments.chat import continuation_ids, opening_ids
from rlcore.environments.host import EnvironmentHost
from rlcore.generator.base import Completion
from rlcore.records.trace import Sampling
from rlcore.rollout import NOT_SAMPLED, Rollout, check_rollout

Complete = Callable[[list[int], int], Awaitable[Completion]]
"""(token ids so far, tokens that may be sampled) -> what was sampled."""


class PromptTooLong(Exception):
    """A task whose opening does not fit; it is left out and counted."""


@dataclass(frozen=True)
class Limits:
    """Tokens that a prompt, an episode and a whole sequence may have."""

    prompt_tokens: int
    sampled_tokens: int
    turns: int
    sequence_tokens: int
    """The longest that the engine takes."""


@dataclass
class _Streams:
    token_ids: list[int]
    loss_mask: list[bool] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        opening, self.token_ids = self.token_ids, []
        self.say(opening)

    def say(self, token_ids: list[int]) -> None:
        n = len(token_ids)
        self.token_ids += token_ids
        self.loss_mask += [False] * n
        self.logprobs += [0.0] * n
        self.versions += [NOT_SAMPLED] * n

    def sample(self, completion: Completion) -> None:
        self.token_ids += completion.token_ids
        self.loss_mask += [True] * len(completion.token_ids)
        self.logprobs += completion.logprobs
        self.versions += completion.policy_versions


async def play(
    task: Task,
    name: str,
    group: str,
    host: EnvironmentHost,
    tokenizer: Any,
    complete: Complete,
    sampling: Sampling,
    limits: Limits,
) -> Rollout:
    """Raises PromptTooLong, EnvironmentFailure or GeneratorError; the episode has then ended."""
    episode, messages = await host.reset(task)
    try:
        opening = opening_ids(tokenizer, messages)
        if len(opening) > limits.prompt_tokens or len(opening) >= limits.sequence_tokens:
            raise PromptTooLong(f"{task.id} has a prompt of {len(opening)} tokens")
        streams = _Streams(opening)
        left, draft_version, finish = limits.sampled_tokens, -1, "turns"
        for turns_left in reversed(range(limits.turns)):
            room = limits.sequence_tokens - len(streams.token_ids)
            if room <= 0:
                finish = "length"
                break
            completion = await complete(streams.token_ids, min(left, room))
            streams.sample(completion)
            left -= len(completion.token_ids)
            draft_version = max(draft_version, completion.draft_version)
            reply = tokenizer.decode(completion.token_ids, skip_special_tokens=True)
            turn = await host.step(episode, reply)
            if turn.done or completion.finish_reason != "stop" or left <= 0:
                finish = completion.finish_reason
                break
            if turns_left:
                streams.say(continuation_ids(tokenizer, turn.messages, streams.token_ids[-1]))
        score = await host.score(episode)
    finally:
        await host.abandon(episode)
    return check_rollout(
        Rollout(
            rollout_id=name,
            task_id=task.id,
            group_id=group,
            token_ids=streams.token_ids,
            prompt_length=len(opening),
            loss_mask=streams.loss_mask,
            logprobs=streams.logprobs,
            policy_versions=streams.versions,
            sampling=sampling,
            draft_version=draft_version,
            finish_reason=finish,
            reward=score.reward,
            reward_parts=score.parts,
            correct=score.correct,
        )
    )
