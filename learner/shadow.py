"""What another drafter would have got out of the very tokens that the live version served.

The engine holds one drafter, so its predecessor cannot draft beside it. But its chain at every anchor
can be replayed from the trace and compared with the committed tokens (see ``objective.acceptance``), so
that its steps over the same tokens can be counted: each starts where the one before ended.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from learner.batch import Span, collate
from learner.drafters.base import Drafter
from learner.objective import acceptance, expected_length
from rlcore.precision import mixed_precision
from rlcore.records import VerifyStep

CUT_SHARE = 0.25
"""Share of the prompt that a prefix-cache hit may have kept out of the span: what the replayed drafter
cannot see makes it look worse than it is."""


@dataclass(frozen=True)
class PairedSteps:
    """Steps that two drafters need for the same ``tokens``."""

    tokens: int
    live: int
    other: float
    """The last of them counts by the share of it that lies within the tokens."""


@torch.inference_mode()
def shadow(other: Drafter, span: Span, live_version: int, steps: int) -> PairedSteps | None:
    """Compare ``other`` with the ``live_version`` over the span, K = ``steps``.

    They are compared from the first drafting step on, as far as the live version drafted K tokens
    in every step and the span holds the target's rows for all of them. None when too much of the
    prompt is not in the span (the context that the engine's drafter had), or another version
    drafted first.
    """
    if span.first_position > CUT_SHARE * span.prompt_length:
        return None
    drafting = [i for i, step in enumerate(span.steps) if step.draft_ids]
    if not drafting:
        return None
    batch = collate([span], with_aux=other.needs_aux)
    with mixed_precision():
        matches, mask = acceptance(other, batch, steps)
    judged = int(mask[:, -1].sum())
    run = []
    for step in span.steps[drafting[0] :]:
        fits = step.draft_version == live_version and len(step.draft_ids) == steps
        if not fits or not 0 <= _anchor(span, step) < judged:
            break
        run.append(step)
    if not run:
        return None
    tokens = sum(step.accepted + 1 for step in run)
    start = _anchor(span, run[0])
    lengths = expected_length(matches)[start:judged].tolist()
    return PairedSteps(tokens, len(run), _walk(lengths, tokens))


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
    """(tokens emitted, steps) of the steps in which the live version drafted something."""
    emitted = steps = 0
    for step in span.steps:
        if step.draft_version == live_version and step.draft_ids:
            emitted += step.accepted + 1
            steps += 1
    return emitted, steps
