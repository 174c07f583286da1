"""What another drafter would have got out of the very steps that the live version took.

The engine holds one drafter, so its predecessor cannot draft beside it. But the predecessor's chain at
each anchor the engine stood at can be replayed from the trace, and compared with the committed
tokens. Both lengths belong to the same step, so the comparison is paired: the live one is what
happened, the other an unbiased estimate of what would have happened (see ``objective.acceptance``).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from learner.batch import Span, collate
from learner.drafters.base import Drafter
from learner.objective import acceptance, expected_length
from rlcore.precision import mixed_precision


@dataclass(frozen=True)
class PairedSteps:
    """Sums over the steps of one span that can be compared."""

    steps: int
    live: int
    """Tokens that the live version's steps emitted, bonus included."""
    other: int
    """Tokens that the other drafter would have emitted at the same anchors."""


@torch.inference_mode()
def shadow(other: Drafter, span: Span, live_version: int, steps: int) -> PairedSteps:
    """Compare ``other`` with the ``live_version`` at its steps in the span, K = ``steps``.

    Left out are steps of other versions, steps whose drafts were cut short, and those so near the
    span's end that not all of a chain's K proposals have a committed token to be compared with.
    """
    batch = collate([span], with_aux=other.needs_aux)
    with mixed_precision():
        matches, mask = acceptance(other, batch, steps)
    lengths = expected_length(matches).tolist()
    whole = mask[:, -1].tolist()
    count = live = theirs = 0
    for step in span.steps:
        # The step at position p drafted from anchor row p - 2 (see drafters/base.py).
        anchor = step.position - 2 - span.first_position - span.first_anchor
        if step.draft_version != live_version or len(step.draft_ids) != steps:
            continue
        if 0 <= anchor < len(lengths) and whole[anchor]:
            count += 1
            live += step.accepted + 1
            theirs += lengths[anchor]
    return PairedSteps(count, live, theirs)


def drafted(span: Span, live_version: int) -> tuple[int, int]:
    """(tokens emitted, steps) of the steps in which the live version drafted something."""
    emitted = steps = 0
    for step in span.steps:
        if step.draft_version == live_version and step.draft_ids:
            emitted += step.accepted + 1
            steps += 1
    return emitted, steps
