"""The laboratory's traffic: recordings cut into a fixed training stream and a fixed held-out part."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from learner.batch import Span
from learner.recording import Recording
from rlcore.errors import PacelineError

HELDOUT_SHARE = 0.15
"""Of the prompts, by the first 8 hex digits of their hash; the same for every run."""


class LaboratoryError(PacelineError):
    """An experiment that cannot be run like this."""


@dataclass(frozen=True)
class Traffic:
    """``training`` in the order it was served; ``heldout`` shares no prompt with it."""

    training: list[Span]
    heldout: list[Span]

    @property
    def training_tokens(self) -> int:
        return sum(span.anchors for span in self.training)

    @property
    def heldout_tokens(self) -> int:
        return sum(span.anchors for span in self.heldout)


def is_heldout(prompt_hash: str) -> bool:
    return int(prompt_hash[:8], 16) < HELDOUT_SHARE * 2**32


def read_traffic(
    paths: Sequence[Path],
    target_id: str,
    method: str,
    aux_width: int,
    training_tokens: int,
    heldout_tokens: int,
) -> Traffic:
    """Equal parts of each recording, from its start, up to so many output positions in all.

    Raises RecordingError for a recording of another target or type of drafter, LaboratoryError when
    they hold nothing to train on or to judge by.
    """
    traffic = Traffic([], [])
    for path in paths:
        recording = Recording(path)
        recording.check(target_id, method)
        recording.check_aux(aux_width)
        wanted = {True: heldout_tokens / len(paths), False: training_tokens / len(paths)}
        for trace, frames in recording:
            heldout = is_heldout(trace.prompt_hash)
            if wanted[heldout] <= 0:
                if max(wanted.values()) <= 0:
                    break
                continue
            span = Span.from_trace(trace, frames)
            if span.anchors:
                wanted[heldout] -= span.anchors
                (traffic.heldout if heldout else traffic.training).append(span)
    if not traffic.training or not traffic.heldout:
        raise LaboratoryError("the recordings hold too few prompts to train on and to judge by")
    return traffic


def batches(spans: Sequence[Span], batch_tokens: int, seed: int) -> Iterator[list[Span]]:
    """Updates of about ``batch_tokens`` output positions, without end: every span once in a seeded
    order, then all again in another."""
    order = random.Random(seed)
    while True:
        chosen: list[Span] = []
        tokens = 0
        for span in order.sample(spans, len(spans)):
            if chosen and tokens + span.anchors > batch_tokens:
                yield chosen
                chosen, tokens = [], 0
            chosen.append(span)
            tokens += span.anchors
        yield chosen
