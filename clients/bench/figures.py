"""Figures made of samples, with bootstrap intervals over blocks. Pure functions.

Modes are compared on blocks that both had: a block's requests were the same and came right after each
other, so what the machine did meanwhile falls out of their ratio.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec
import numpy as np

from clients.bench.plan import ONLINE
from clients.bench.samples import Sample

RESAMPLES = 10_000
BOUNDS = (2.5, 97.5)
"""Percentiles: a 95 % interval."""

GOAL_BLOCKS = 3
"""A goal is reached when so many blocks in a row, pooled, are at it."""


class Interval(msgspec.Struct, frozen=True):
    """A pooled figure; the bounds are None for fewer than two blocks."""

    value: float
    low: float | None
    high: float | None
    blocks: int


class ModeFigures(msgspec.Struct, frozen=True, kw_only=True):
    """One mode in the measured window of one phase."""

    phase: str
    mode: str
    requests: int
    failed: int
    output_tokens: int
    tokens_per_second: Interval | None
    """Of the server: over the time from a block's first start to its last end."""
    stream_tokens_per_second: Interval | None
    """Of a request: tokens over what it took, waiting included."""
    acceptance_length: Interval | None
    """Tokens per step in which something was drafted, bonus included; None if nothing was."""
    tokens_per_step: Interval | None
    """Over all decode steps; 1 without speculation."""


class Ratio(msgspec.Struct, frozen=True, kw_only=True):
    """Mode over base in the measured window of one phase, on the blocks that both had."""

    phase: str
    mode: str
    base: str
    tokens_per_second: Interval
    stream_tokens_per_second: Interval


class Reached(msgspec.Struct, frozen=True):
    """When online's tokens/s over the base's first was at the goal; None if it never was."""

    phase: str
    base: str
    goal: float
    phase_tokens: int | None
    """Tokens that the online server had served since the phase began."""
    run_tokens: int | None
    """Since the run began."""


Parts = Callable[[Sample], tuple[float, float]]
"""Numerator and denominator of a pooled figure."""


def throughput(sample: Sample) -> tuple[float, float]:
    return sample.output_tokens, sample.seconds


def stream_speed(sample: Sample) -> tuple[float, float]:
    return sample.output_tokens, sample.request_seconds


def length(sample: Sample) -> tuple[float, float]:
    return sample.emitted, sample.steps


def all_steps(sample: Sample) -> tuple[float, float]:
    return sample.emitted + sample.plain_steps, sample.steps + sample.plain_steps


def pooled(samples: Sequence[Sample], parts: Parts, seed: int = 0) -> Interval | None:
    """Sum over sum; None when there is nothing to divide by."""
    return _interval(_table(samples, parts), lambda sums: sums[..., 0] / sums[..., 1], [1], seed)


def paired(
    samples: Sequence[Sample], base: Sequence[Sample], parts: Parts, seed: int = 0
) -> Interval | None:
    """Ratio of two pooled figures on the blocks that are in both; whole blocks are resampled."""
    ours = {sample.block: sample for sample in samples}
    theirs = {sample.block: sample for sample in base}
    both = sorted(ours.keys() & theirs.keys())
    table = np.hstack(
        [_table([ours[b] for b in both], parts), _table([theirs[b] for b in both], parts)]
    )
    return _interval(
        table,
        lambda s: (s[..., 0] / s[..., 1]) / (s[..., 2] / s[..., 3]),
        [0, 1, 2, 3],
        seed,
    )


def _table(samples: Sequence[Sample], parts: Parts) -> np.ndarray:
    return np.array([parts(sample) for sample in samples], dtype=float).reshape(-1, 2)


def _interval(
    table: np.ndarray,
    figure: Callable[[np.ndarray], np.ndarray],
    needed: Sequence[int],
    seed: int,
) -> Interval | None:
    """The figure of the columns' sums, and its spread when rows are drawn with replacement.

    None when the sum of a ``needed`` column is zero.
    """
    blocks = len(table)
    sums = table.sum(axis=0)
    if blocks == 0 or not sums[needed].all():
        return None
    value = float(figure(sums))
    if blocks == 1:
        return Interval(value, None, None, 1)
    drawn = np.random.default_rng(seed).integers(0, blocks, (RESAMPLES, blocks))
    totals = table[drawn].sum(axis=1)
    usable = totals[totals[:, needed].all(axis=1)]  # a draw in which no block drafted has no length
    low, high = (float(q) for q in np.percentile(figure(usable), BOUNDS))
    return Interval(value, low, high, blocks)


def of_mode(samples: Sequence[Sample], phase: str, mode: str) -> list[Sample]:
    return [s for s in samples if s.phase == phase and s.mode == mode]


def mode_figures(samples: Sequence[Sample], phase: str, mode: str) -> ModeFigures:
    mine = [s for s in of_mode(samples, phase, mode) if s.measured]
    return ModeFigures(
        phase=phase,
        mode=mode,
        requests=sum(s.requests for s in mine),
        failed=sum(s.failed for s in mine),
        output_tokens=sum(s.output_tokens for s in mine),
        tokens_per_second=pooled(mine, throughput),
        stream_tokens_per_second=pooled(mine, stream_speed),
        acceptance_length=pooled(mine, length),
        tokens_per_step=pooled(mine, all_steps),
    )


def ratio(samples: Sequence[Sample], phase: str, mode: str, base: str) -> Ratio | None:
    """None when they share no measured block in which both served something."""
    ours, theirs = (
        [s for s in of_mode(samples, phase, name) if s.measured] for name in (mode, base)
    )
    server, stream = paired(ours, theirs, throughput), paired(ours, theirs, stream_speed)
    if server is None or stream is None:
        return None
    return Ratio(
        phase=phase, mode=mode, base=base, tokens_per_second=server, stream_tokens_per_second=stream
    )


def reached(samples: Sequence[Sample], phase: str, base: str, goal: float) -> Reached:
    """Online over base, on the blocks of the phase that both had, measured or not, in their order."""
    online, theirs = (
        {s.block: s for s in of_mode(samples, phase, name)} for name in (ONLINE, base)
    )
    both = sorted(online.keys() & theirs.keys())
    begin = min((s.lead_tokens - s.output_tokens for s in online.values()), default=0)
    for last in range(GOAL_BLOCKS, len(both) + 1):
        window = both[last - GOAL_BLOCKS : last]
        if _speed([online[b] for b in window]) >= goal * _speed([theirs[b] for b in window]):
            tokens = online[window[-1]].lead_tokens
            return Reached(phase, base, goal, tokens - begin, tokens)
    return Reached(phase, base, goal, None, None)


def _speed(samples: Sequence[Sample]) -> float:
    return sum(s.output_tokens for s in samples) / sum(s.seconds for s in samples)
