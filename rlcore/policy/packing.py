"""Rollouts into packed rows: a group's prompt is computed once, however many rollouts share it.

A row is one prompt followed by the continuations that share it, side by side. Each token attends to
the prompt and to what precedes it in its own continuation, and its position counts from the prompt's
start, so every continuation is computed exactly as if it stood alone. With eight short answers to a
prompt that is a fraction of the tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rlcore.rollout import Rollout

PROMPT = 0
"""Segment of the shared prompt; continuations count from 1."""

PADDING = -1


@dataclass(frozen=True)
class WeightedRollout:
    """A rollout and what the algorithm makes of it."""

    rollout: Rollout
    advantage: float
    sequence: int
    """Its index in the whole batch."""


@dataclass(frozen=True)
class PolicyBatch:
    """A micro-batch: R rows of T tokens (padded), S sampled tokens in all."""

    token_ids: Tensor
    """[R, T] int64."""
    positions: Tensor
    """[R, T] int64."""
    segments: Tensor
    """[R, T] int64: PROMPT, a continuation's number, or PADDING."""
    predicted_at: Tensor
    """[S] int64: index into R * T of the token whose output predicts the sampled one."""
    labels: Tensor
    """[S] int64: the sampled tokens."""
    sequence: Tensor
    """[S] int64: index of the rollout in the whole batch."""
    inference_logprobs: Tensor
    """[S] float32."""
    advantages: Tensor
    """[S] float32."""
    temperatures: Tensor
    """[S] float32: that the token was sampled at."""
    on_policy: Tensor
    """[S] bool: sampled by the very version that is trained."""
    old_logprobs: Tensor | None = None
    """[S] float32: by the policy before the first update on this batch; None where there is one."""

    @property
    def tokens(self) -> int:
        return int((self.segments != PADDING).sum())

    def attention_mask(self) -> Tensor:
        """[R, 1, T, T] bool: True where the query (third) may attend to the key (fourth).

        Padding attends to itself, so that no row of the softmax is empty.
        """
        segments = self.segments
        length = segments.shape[1]
        causal = torch.ones(length, length, dtype=torch.bool, device=segments.device).tril()
        same = segments[:, :, None] == segments[:, None, :]
        prompt = segments[:, None, :] == PROMPT
        mask = causal & (same | (prompt & (segments != PADDING)[:, :, None]))
        return mask[:, None]


@dataclass
class _Row:
    prompt: list[int]
    members: list[WeightedRollout]

    @property
    def length(self) -> int:
        return len(self.prompt) + sum(
            len(m.rollout.token_ids) - len(self.prompt) for m in self.members
        )


def pack(rollouts: Sequence[WeightedRollout], max_tokens: int, version: int) -> list[PolicyBatch]:
    """Micro-batches of at most ``max_tokens`` (padding included) where the rollouts allow it.

    ``version``: of the policy that is trained.
    A rollout longer than that has a row, and a micro-batch, of its own. Rollouts that sampled
    nothing are left out.
    """
    rows = sorted(_rows(rollouts, max_tokens), key=lambda row: row.length)
    batches: list[list[_Row]] = []
    for row in rows:
        if batches and (len(batches[-1]) + 1) * row.length <= max_tokens:
            batches[-1].append(row)
        else:
            batches.append([row])
    return [_batch(batch, version) for batch in batches]


def _rows(rollouts: Sequence[WeightedRollout], max_tokens: int) -> list[_Row]:
    rows: dict[tuple[int, ...], list[_Row]] = {}
    for weighted in rollouts:
        rollout = weighted.rollout
        if rollout.sampled == 0:
            continue
        prompt = rollout.token_ids[: rollout.prompt_length]
        same = rows.setdefault(tuple(prompt), [])
        added = len(rollout.token_ids) - len(prompt)
        if not same or same[-1].length + added > max_tokens:
            same.append(_Row(prompt, []))
        same[-1].members.append(weighted)
    return [row for same in rows.values() for row in same]


def _batch(rows: list[_Row], version: int) -> PolicyBatch:
    length = max(row.length for row in rows)
    shape = (len(rows), length)
    token_ids = torch.zeros(shape, dtype=torch.int64)
    positions = torch.zeros(shape, dtype=torch.int64)
    segments = torch.full(shape, PADDING, dtype=torch.int64)
    predicted_at: list[int] = []
    labels: list[int] = []
    sequence: list[int] = []
    logprobs: list[float] = []
    advantages: list[float] = []
    temperatures: list[float] = []
    on_policy: list[bool] = []
    for r, row in enumerate(rows):
        start = len(row.prompt)
        token_ids[r, :start] = torch.tensor(row.prompt)
        positions[r, :start] = torch.arange(start)
        segments[r, :start] = PROMPT
        at = start
        for number, member in enumerate(row.members, start=1):
            rollout = member.rollout
            count = len(rollout.token_ids) - start
            token_ids[r, at : at + count] = torch.tensor(rollout.token_ids[start:])
            positions[r, at : at + count] = torch.arange(start, start + count)
            segments[r, at : at + count] = number
            for i in range(start, start + count):
                if not rollout.loss_mask[i]:
                    continue
                before = start - 1 if i == start else at + (i - start) - 1
                predicted_at.append(r * length + before)
                labels.append(rollout.token_ids[i])
                sequence.append(member.sequence)
                logprobs.append(rollout.logprobs[i])
                advantages.append(member.advantage)
                temperatures.append(rollout.sampling.temperature)
                on_policy.append(rollout.policy_versions[i] == version)
            at += count
    return PolicyBatch(
        token_ids=token_ids,
        positions=positions,
        segments=segments,
        predicted_at=torch.tensor(predicted_at, dtype=torch.int64),
        labels=torch.tensor(labels, dtype=torch.int64),
        sequence=torch.tensor(sequence, dtype=torch.int64),
        inference_logprobs=torch.tensor(logprobs, dtype=torch.float32),
        advantages=torch.tensor(advantages, dtype=torch.float32),
        temperatures=torch.tensor(temperatures, dtype=torch.float32),
        on_policy=torch.tensor(on_policy, dtype=torch.bool),
    )
