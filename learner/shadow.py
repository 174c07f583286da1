"""What another drafter would have got out of the very tokens that the live version served.

The engine holds one drafter, so its predecessor cannot draft beside it. But its chain at every anchor
can be replayed from the trace and compared with the committed tokens (see ``objective.acceptance``), so
that its steps over the same tokens can be counted: each starts where the one before ended.

The live version may have drafted fewer than K tokens, or none, because more did not pay just then. What
it would have got out of K is then replayed as well; where it is known from the step it is taken from
there.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from learner.batch import Span, collate
from learner.drafters.base import Drafter
from learner.objective import acceptance, expected_length
from rlcore.precision import mixed_precision
from rlcore.records.trace import VerifyStep

CUT_SHARE = 0.25
"""Share of the prompt that a prefix-cache hit may have kept out of the span: what the replayed drafter
cannot see makes it look worse than it is."""


@dataclass(frozen=True)
class PairedSteps:
    """Steps that two drafters need for the same ``tokens``, at K drafts a step.

    The last of them counts by the share of it that lies within the tokens.
    """

    tokens: int
    live: float
    other: float


@torch.inference_mode()
def shadow(
    live: Drafter, other: Drafter, span: Span, live_version: int, steps: int
) -> PairedSteps | None:
    """Compare ``other`` with ``live``, which serves as ``live_version``, over the span; K = ``steps``.

    They are compared from the first step on, as far as the live version was there in every step and
    the span holds the target's rows for all of them. None when too much of the prompt is not in the
    span (the context that the engine's drafter had), or another version drafted first.
    """
    if span.first_position > CUT_SHARE * span.prompt_length or not span.steps:
        return None
    batch = collate([span], with_aux=other.needs_aux)
    with mixed_precision():
        matches, mask = acceptance(other, batch, steps)
    judged = int(mask[:, -1].sum())
    run = []
    for step in span.steps:
        at = _anchor(span, step)
        if at < 0 and not step.draft_ids:
            continue  # the first token has no anchor
        if step.draft_version != live_version or not 0 <= at < judged:
            break
        run.append(step)
    if not run:
        return None
    tokens = sum(step.accepted + 1 for step in run)
    first = _anchor(span, run[0])
    theirs = expected_length(matches)[first:judged].tolist()
    known = [_known_length(step, steps) for step in run]
    if all(length is not None for length in known):
        return PairedSteps(tokens, len(run), _walk(theirs, tokens))
    with mixed_precision():
        matches, _ = acceptance(live, batch, steps)
    mine = expected_length(matches)[first:judged].tolist()
    for step, length in zip(run, known, strict=True):
        if length is not None:
            mine[_anchor(span, step) - first] = length
    return PairedSteps(tokens, _walk(mine, tokens), _walk(theirs, tokens))


def _known_length(step: VerifyStep, steps: int) -> int | None:
    """Tokens that the step would have emitted with K drafts; None where too few were drafted."""
    drafted = len(step.draft_ids)
    return step.accepted + 1 if drafted >= steps or step.accepted < drafted else None


def _anchor(span: Span, step: VerifyStep) -> int:
    """Among the span's anchors: a step at position p drafts from row p - 2 (see drafters/base.py)."""
    return step.position - 2 - span.first_position - span.first_anchor


def _walk(lengths: list[int], tokens: int) -> float:
    """Steps that it takes to emit ``tokens``; beyond the known lengths one is taken as the last."""
    at, steps = 0, 0.0
    while at < tokens:
        length = lengths[min(at, len(lengths) - 1)]
        steps += min(1.0, (tokens - at) / length)
        at += length
    return steps


def drafted(span: Span, live_version: int) -> tuple[int, int]:
    """(tokens emitted, steps) of the steps in which the live version drafted something.

    Counted as if one token had been drafted in each, so that what follows from it does not depend on
    how many were.
    """
    emitted = steps = 0
    for step in span.steps:
        if step.draft_version == live_version and step.draft_ids:
            emitted += min(step.accepted, 1) + 1
            steps += 1
    return emitted, steps
