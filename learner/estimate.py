"""How long drafts would live: estimates from recorded spans, without an engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from learner.batch import Span, collate
from learner.drafters.base import Drafter
from learner.objective import acceptance, expected_length


@dataclass(frozen=True)
class SpanLengths:
    """Sums over one span, K drafts a step; additive over spans.

    ``length_sum / anchors`` is the expected length from a position picked at random (every anchor
    counts: the lowest variance, for comparing drafters). ``emitted / steps`` is that of the steps
    the engine would really take, which skip the positions that an accepted draft covered: the
    estimate of the live acceptance length. ``accepted[k] / reached[k]`` is the conditional
    acceptance of draft k over all anchors.
    """

    length_sum: int
    anchors: int
    emitted: int
    steps: int
    accepted: tuple[int, ...]
    reached: tuple[int, ...]


@torch.inference_mode()
def chain_lengths(drafter: Drafter, spans: Sequence[Span], steps: int) -> list[SpanLengths]:
    """One entry per span. Anchors with fewer than ``steps`` target rows ahead are left out."""
    batch = collate(spans, with_aux=drafter.needs_aux)
    matches, mask = acceptance(drafter, batch, steps)
    lengths = expected_length(matches)
    results = []
    for start, _, count in batch.anchor_ranges():
        whole = int(mask[start : start + count, -1].sum())
        part = slice(start, start + whole)
        alive = matches[part].long().cumprod(dim=1).sum(dim=0).tolist()
        emitted, walked = _walk(lengths[part].tolist())
        results.append(
            SpanLengths(
                length_sum=int(lengths[part].sum()),
                anchors=whole,
                emitted=emitted,
                steps=walked,
                accepted=tuple(alive),
                reached=(whole, *alive[:-1]),
            )
        )
    return results


def _walk(lengths: list[int]) -> tuple[int, int]:
    """(tokens emitted, steps) when each step starts where the one before ended."""
    at, emitted, steps = 0, 0, 0
    while at < len(lengths):
        emitted += lengths[at]
        steps += 1
        at += lengths[at]
    return emitted, steps


@torch.inference_mode()
def replay_drafts(drafter: Drafter, span: Span) -> list[list[int] | None]:
    """What the drafter would have drafted at each of ``span.steps``, as many tokens as the engine.

    None for a step whose anchor lies before the span. The context reaches back to the span's start
    only, so a span that does not hold the whole request can differ from what was served.
    """
    most = max((len(step.draft_ids) for step in span.steps), default=0)
    if most == 0:
        return [[] for _ in span.steps]
    batch = collate([span], with_aux=drafter.needs_aux)
    hidden = drafter.unroll(batch, most, own_tokens=True)
    drafts = torch.stack([drafter.propose(h) for h in hidden], dim=1)
    results: list[list[int] | None] = []
    for step in span.steps:
        index = step.position - 2 - span.first_position - span.first_anchor
        if not step.draft_ids:
            results.append([])
        elif 0 <= index < len(drafts):
            results.append(drafts[index, : len(step.draft_ids)].tolist())
        else:
            results.append(None)
    return results
