"""Figures of a sweep, by concurrency and mode, with bootstrap intervals over blocks. Pure functions."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from clients.bench.figures import (
    Interval,
    all_steps,
    length,
    paired,
    pooled,
    stream_speed,
    throughput,
)
from clients.bench.latency import (
    Percentiles,
    chunk_gaps,
    first_token_times,
    percentiles,
    token_times,
)
from clients.bench.runner import BlockRecords
from clients.bench.samples import Sample
from clients.summary import served


class LevelFigures(msgspec.Struct, frozen=True, kw_only=True):
    """One mode at one concurrency. Times are seconds, of requests that did not fail."""

    concurrency: int
    mode: str
    requests: int
    failed: int
    output_tokens: int
    tokens_per_second: Interval | None
    """Of the server: over the time from a block's first start to its last end."""
    first_token_s: Percentiles | None
    """From a request's start."""
    gap_s: Percentiles | None
    """Between neighbouring chunks of a stream; a chunk holds all tokens of a step."""
    token_s: Percentiles | None
    """A value a request: time per output token behind the first chunk."""
    acceptance_length: Interval | None
    """Tokens per step in which something was drafted, bonus included; None if nothing was."""
    tokens_per_step: Interval | None
    """Over all decode steps; 1 without speculation."""
    mean_k: Interval | None
    """Drafts verified per decode step of a request; None where plain vLLM drafts."""


class LevelRatio(msgspec.Struct, frozen=True, kw_only=True):
    """Mode over base at one concurrency, on the blocks that both had."""

    concurrency: int
    mode: str
    base: str
    tokens_per_second: Interval
    stream_tokens_per_second: Interval
    """Of a request: tokens over what it took, waiting included."""


def level_figures(
    samples: Sequence[Sample], records: Sequence[BlockRecords], concurrency: int, mode: str
) -> LevelFigures:
    mine = at_level(samples, concurrency, mode)
    blocks = {sample.block for sample in mine}
    good = [served(r.records) for r in records if r.mode == mode and r.block in blocks]
    return LevelFigures(
        concurrency=concurrency,
        mode=mode,
        requests=sum(s.requests for s in mine),
        failed=sum(s.failed for s in mine),
        output_tokens=sum(s.output_tokens for s in mine),
        tokens_per_second=pooled(mine, throughput),
        first_token_s=percentiles([first_token_times(part) for part in good]),
        gap_s=percentiles([chunk_gaps(part) for part in good]),
        token_s=percentiles([token_times(part) for part in good]),
        acceptance_length=pooled(mine, length),
        tokens_per_step=pooled(mine, all_steps),
        mean_k=mean_k(mine),
    )


def mean_k(samples: Sequence[Sample]) -> Interval | None:
    """None as soon as one sample's drafts are not known."""
    if any(sample.drafted is None for sample in samples):
        return None
    return pooled(samples, lambda s: (s.drafted or 0, s.steps + s.plain_steps))


def level_ratio(
    samples: Sequence[Sample], concurrency: int, mode: str, base: str
) -> LevelRatio | None:
    """None when they share no block in which both served something."""
    ours, theirs = (at_level(samples, concurrency, name) for name in (mode, base))
    server, stream = paired(ours, theirs, throughput), paired(ours, theirs, stream_speed)
    if server is None or stream is None:
        return None
    return LevelRatio(
        concurrency=concurrency,
        mode=mode,
        base=base,
        tokens_per_second=server,
        stream_tokens_per_second=stream,
    )


def at_level(samples: Sequence[Sample], concurrency: int, mode: str) -> list[Sample]:
    return [s for s in samples if s.concurrency == concurrency and s.mode == mode]
