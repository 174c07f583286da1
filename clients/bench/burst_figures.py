"""What is sent in a burst of load, and what is made of it. Pure functions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from clients.bench import common
from clients.bench.drafting import Change, Mark, change_of, intervals
from clients.bench.figures import Interval, of_mode, paired, pooled, throughput
from clients.bench.plan import Block, order
from clients.bench.samples import Sample
from clients.workload import Prompt

ADAPTIVE, OFF = "adaptive", "off"
PHASES = ("before", "burst", "after")


class Trace(msgspec.Struct):
    """``marks`` begin with the counters before the phase."""

    round: int
    phase: str
    mode: str
    marks: list[Mark]


class PhaseFigures(msgspec.Struct, kw_only=True):
    phase: str
    concurrency: int
    tokens_per_second: dict[str, Interval]
    best_fixed: str | None
    """The fastest without adaptation, by hindsight; off counts as fixed at 0."""
    adaptive_over_best: Interval | None


class PhaseChange(msgspec.Struct, kw_only=True):
    round: int
    phase: str
    change: Change
    engine_steps_earliest: float | None
    engine_steps_latest: float | None
    """``change``'s steps, divided by the requests at a time."""


def plan_blocks(
    prompts: Sequence[Prompt],
    modes: Sequence[str],
    *,
    rounds: int,
    alone: int,
    burst: int,
    waves: int,
) -> list[Block]:
    """Blocks in their order: before, burst and after, round by round. No prompt is in two of them."""
    blocks: list[Block] = []
    sizes = (alone, waves * burst, alone)
    common.take(prompts, rounds * sum(sizes), f"{rounds} rounds")
    for number in range(rounds):
        for position, (phase, size) in enumerate(zip(PHASES, sizes, strict=True)):
            taken, prompts = common.take(prompts, size, phase)
            width = burst if phase == "burst" else 1
            turn = order(modes, 2 * position + number)  # the next round has it backwards
            blocks.append(Block(len(blocks), phase, True, turn, tuple(taken), width))
    return blocks


def best_fixed(speeds: Mapping[str, float]) -> str | None:
    """The fastest mode apart from adaptive."""
    fixed = {mode: speed for mode, speed in speeds.items() if mode != ADAPTIVE}
    return max(fixed, key=fixed.__getitem__) if fixed else None


def phase_figures(samples: Sequence[Sample], phase: str, modes: Sequence[str]) -> PhaseFigures:
    mine = {mode: of_mode(samples, phase, mode) for mode in modes}
    found = {mode: pooled(mine[mode], throughput) for mode in modes}
    speeds = {mode: speed for mode, speed in found.items() if speed is not None}
    best = best_fixed({mode: speed.value for mode, speed in speeds.items()})
    over = None
    if best is not None and ADAPTIVE in speeds:
        over = paired(mine[ADAPTIVE], mine[best], throughput)
    return PhaseFigures(
        phase=phase,
        concurrency=next(s.concurrency for s in samples if s.phase == phase),
        tokens_per_second=speeds,
        best_fixed=best,
        adaptive_over_best=over,
    )


def phase_changes(traces: Sequence[Trace], burst: int) -> list[PhaseChange]:
    """What adaptive did at the begin of each phase that follows another."""
    marks = {(t.round, t.phase): t.marks for t in traces if t.mode == ADAPTIVE}
    found = []
    for (number, phase), mine in marks.items():
        if phase == PHASES[0]:
            continue
        previous = marks[number, PHASES[PHASES.index(phase) - 1]]
        change = change_of(intervals(previous), intervals(mine))
        if change is not None:
            width = burst if phase == "burst" else 1
            ends = (change.earliest, change.latest)
            low, high = (None if end is None else end / width for end in ends)
            found.append(
                PhaseChange(
                    round=number,
                    phase=phase,
                    change=change,
                    engine_steps_earliest=low,
                    engine_steps_latest=high,
                )
            )
    return found
