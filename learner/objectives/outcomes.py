"""What became of the drafts that were served, laid out for training: rewards without a model.

A span's verification steps say where the engine stood, what it had drafted, and where the target put
a token of its own in place of a draft. Drafts behind the first rejected one are off the path and no
signal; plain steps (nothing drafted) say nothing of the drafter.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Self

import torch
from torch import Tensor

from learner.batch import Span, SpanBatch

UNKNOWN, ACCEPTED, REJECTED = 0, 1, 2
"""Verdicts on a position: nothing drafted there was judged; the draft was accepted; rejected."""


@dataclass(frozen=True)
class Outcomes:
    """One entry for each anchor of a batch, in its order.

    drafted   [N]  drafts verified in the step that the engine took at the anchor; 0 when there was
                   no such step, or nothing was drafted in it
    accepted  [N]  how many of them the target accepted
    rejected  [N]  target id of the first rejected one; -1 when none was
    passed    [N]  bool: accepted drafts led past the anchor, so the engine did not draft from it
    verdict   [N]  of the position that the anchor's first draft stands at, whichever step judged it
    wrong     [N]  target id of the draft that was rejected at that position; -1 when none was
    """

    drafted: Tensor
    accepted: Tensor
    rejected: Tensor
    passed: Tensor
    verdict: Tensor
    wrong: Tensor

    def by_position(self) -> Outcomes:
        """Every judged draft as the first one of the anchor before its position.

        That is what it was for a drafter that does not read its own states: it drafts the same behind
        accepted drafts as behind committed tokens.
        """
        return Outcomes(
            drafted=(self.verdict != UNKNOWN).long(),
            accepted=(self.verdict == ACCEPTED).long(),
            rejected=self.wrong,
            passed=torch.zeros_like(self.passed),
            verdict=self.verdict,
            wrong=self.wrong,
        )

    def verdicts(self, judged: Tensor) -> Tensor:
        """[N, K]: verdict of the position that draft step j of each anchor proposes.

        Anchors of a span are neighbours, so step j of anchor n stands where step 0 of anchor n + j
        does; where ``judged`` [N, K] is true that one is in the same span.
        """
        steps = judged.shape[1]
        place = torch.arange(len(self.verdict)).unsqueeze(1) + torch.arange(steps)
        found = self.verdict[place.clamp(max=max(0, len(self.verdict) - 1))]
        return torch.where(judged, found, UNKNOWN)


def collect_outcomes(spans: Sequence[Span]) -> Outcomes:
    """The outcomes of all anchors of the spans, span by span, as ``collate`` orders them."""
    total = sum(span.anchors for span in spans)
    drafted = torch.zeros(total, dtype=torch.long)
    accepted = torch.zeros(total, dtype=torch.long)
    passed = torch.zeros(total, dtype=torch.bool)
    rejected = torch.full((total,), -1)
    verdict = torch.full((total,), UNKNOWN)
    wrong = torch.full((total,), -1)
    start = 0
    for span in spans:
        for step in span.steps:
            # A step whose first draft stands at position p was drafted from the anchor p - 2.
            at = step.position - 2 - span.first_position - span.first_anchor
            if not 0 <= at < span.anchors:
                continue
            index, end = start + at, start + span.anchors
            drafted[index] = len(step.draft_ids)
            accepted[index] = step.accepted
            passed[index + 1 : min(index + step.accepted + 1, end)] = True
            verdict[index : min(index + step.accepted, end)] = ACCEPTED
            if step.accepted < len(step.draft_ids):
                rejected[index] = step.draft_ids[step.accepted]
                if index + step.accepted < end:
                    verdict[index + step.accepted] = REJECTED
                    wrong[index + step.accepted] = step.draft_ids[step.accepted]
        start += span.anchors
    return Outcomes(drafted, accepted, rejected, passed, verdict, wrong)


def nothing_served(anchors: int) -> Outcomes:
    """The outcomes of anchors of which nothing is known."""
    zeros, none = torch.zeros(anchors, dtype=torch.long), torch.full((anchors,), -1)
    return Outcomes(zeros, zeros, none, torch.zeros(anchors, dtype=torch.bool), zeros, none)


@dataclass(frozen=True)
class ServedBatch(SpanBatch):
    """A batch of spans together with what became of the drafts served in them."""

    outcomes: Outcomes

    @classmethod
    def of(cls, batch: SpanBatch, spans: Sequence[Span]) -> Self:
        """``batch`` as ``collate`` made it of these spans."""
        values = {field.name: getattr(batch, field.name) for field in fields(SpanBatch)}
        return cls(**values, outcomes=collect_outcomes(spans))


@dataclass(frozen=True)
class OutcomeWeights:
    """How much a judged draft counts in the loss, by what became of the drafts that were served.

    The weight of draft step j at anchor t is the product of a factor for the position proposed, one
    for the anchor, and one for what lies between them. All are 1 where nothing is known.
    """

    rejected: float = 1.0
    """Position where the served draft was rejected."""
    accepted: float = 1.0
    """Position that an accepted draft covered."""
    passed: float = 1.0
    """Anchor that accepted drafts led past; the engine drafts from the others."""
    behind: float = 1.0
    """For each position before the proposed one where the served draft was rejected: the path is
    likely to end there."""

    def of(self, outcomes: Outcomes, judged: Tensor) -> Tensor:
        """[N, K]"""
        verdicts = outcomes.verdicts(judged)
        position = torch.tensor([1.0, self.accepted, self.rejected])[verdicts]
        anchor = torch.where(outcomes.passed, self.passed, 1.0).unsqueeze(1)
        ended = (verdicts == REJECTED).long()
        between = self.behind ** (ended.cumsum(1) - ended)
        return position * anchor * between
