"""The report of ``paceline bench``: its JSON and its tables.

Fields of the JSON. Times are seconds since the first request of the run; an interval is
``{value, low, high, blocks}``, a bootstrap over blocks at 95 %.

======================  ==============================================================================
``machine``             processor, cores, memory, versions, load average before the run
``load_average_after``  load average after it
``options``             everything that was asked for, defaults included
``modes``               by mode: what it is, command, flags and environment of its server, seconds to start
``skipped``             modes asked for that could not be run, and why
``phases``              name, files and prompt ids, in the order sent; no prompt stands in it twice
``blocks``              number, phase, measured or not, the modes in their order, concurrency, how many
                        prompts
``figures``             by phase and mode, measured windows only: ``clients.bench.figures.ModeFigures``
``ratios``              by phase, mode over base, the same windows: ``clients.bench.figures.Ratio``
``reached``             after how many tokens online was at ``--goal`` times the base: ``Reached``
``equal_answers``       by mode: greedy answers with the same tokens as the first mode's, and how many
                        were compared; in bfloat16 near ties may fall differently (null if sampled)
``changes``             versions that went live: time, tokens and requests served online, rollback or not
``samples``             every block on every mode: ``clients.bench.samples.Sample``
``readings``            the online server's status while it was served: ``clients.bench.samples.Reading``
``records``             every request: ids, times, tokens, version at admission, acceptance by version
``final_status``        the online server's status at the end
``stopped``             why the run ended before its plan did; null if it did not
======================  ==============================================================================
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from clients.bench import common
from clients.bench.figures import (
    Interval,
    ModeFigures,
    Ratio,
    Reached,
    mode_figures,
    ratio,
    reached,
)
from clients.bench.phases import Phase
from clients.bench.plan import ONLINE
from clients.bench.run_json import run_json
from clients.bench.runner import BlockRecords
from clients.bench.samples import Change, Reading, Sample, changes_of
from clients.bench.session import Session


class Results(msgspec.Struct, kw_only=True):
    """What a run found."""

    figures: list[ModeFigures]
    ratios: list[Ratio]
    reached: list[Reached]
    equal_answers: dict[str, tuple[int, int]] | None
    changes: list[Change]


def results_of(
    args: argparse.Namespace,
    phases: Sequence[Phase],
    modes: Sequence[str],
    samples: Sequence[Sample],
    records: Sequence[BlockRecords],
    readings: Sequence[Reading],
) -> Results:
    """Online, or else the last mode, is compared with each of the others."""
    ours = ONLINE if ONLINE in modes else modes[-1]
    bases = [mode for mode in modes if mode != ours]
    pairs = [(phase.name, base) for phase in phases for base in bases]
    ratios = [ratio(samples, phase, ours, base) for phase, base in pairs]
    return Results(
        figures=[mode_figures(samples, phase.name, mode) for phase in phases for mode in modes],
        ratios=[found for found in ratios if found is not None],
        reached=[reached(samples, phase, base, args.goal) for phase, base in pairs]
        if ours == ONLINE
        else [],
        equal_answers=equal_answers(modes, records) if args.temperature == 0 else None,
        changes=changes_of(readings),
    )


def equal_answers(
    modes: Sequence[str], records: Iterable[BlockRecords]
) -> dict[str, tuple[int, int]]:
    """By mode: answers with the first mode's tokens, and answers compared."""
    answers: dict[str, dict[str, list[int]]] = {mode: {} for mode in modes}
    for part in records:
        for record in part.records:
            if record.error is None:
                tokens = [token for chunk in record.token_ids for token in chunk]
                answers[part.mode][record.prompt_id] = tokens
    first = answers[modes[0]]
    return {
        mode: (
            sum(first[i] == theirs[i] for i in first.keys() & theirs),
            len(first.keys() & theirs),
        )
        for mode, theirs in answers.items()
        if mode != modes[0]
    }


def as_json(
    args: argparse.Namespace, session: Session, phases: Sequence[Phase], results: Results
) -> dict[str, Any]:
    return {
        "benchmark": "bench",
        **run_json(args, session),
        "phases": [
            {"name": p.name, "files": p.files, "prompts": [q.id for q in p.prompts]} for p in phases
        ],
        **msgspec.structs.asdict(results),
    }


def print_results(args: argparse.Namespace, results: Results, skipped: Sequence[str]) -> None:
    common.print_table(
        "Speed in the measured windows (95 % intervals over blocks)",
        ["phase", "mode", "requests", "tokens/s", "tokens/s of a stream"],
        [
            [
                f.phase,
                f.mode,
                f"{f.requests}, {f.failed} failed" if f.failed else f.requests,
                show(f.tokens_per_second, 1),
                show(f.stream_tokens_per_second, 1),
            ]
            for f in results.figures
        ],
    )
    common.print_table(
        "Lengths in the measured windows",
        ["phase", "mode", "acceptance length", "tokens per step"],
        [
            [f.phase, f.mode, show(f.acceptance_length), show(f.tokens_per_step)]
            for f in results.figures
        ],
    )
    if results.ratios:
        common.print_table(
            "Ratios on the same requests",
            ["phase", "", "tokens/s", "tokens/s of a stream", "blocks"],
            [
                [
                    r.phase,
                    f"{r.mode} / {r.base}",
                    show(r.tokens_per_second),
                    show(r.stream_tokens_per_second),
                    r.tokens_per_second.blocks,
                ]
                for r in results.ratios
            ],
        )
    if results.reached:
        common.print_table(
            f"Tokens served until online was {args.goal:g} times as fast",
            ["phase", "as", "since the phase began", "since the run began"],
            [[r.phase, r.base, r.phase_tokens, r.run_tokens] for r in results.reached],
        )
    say = common.console.print
    for mode, (equal, compared) in (results.equal_answers or {}).items():
        say(f"{mode}: {equal} of {compared} answers have the same tokens as the first mode's.")
    rollbacks = sum(change.rollback for change in results.changes)
    say(f"Versions that went live: {len(results.changes) - rollbacks}; rollbacks: {rollbacks}.")
    for line in skipped:
        say(line)


def show(figure: Interval | None, digits: int = 3) -> str:
    if figure is None:
        return "-"
    if figure.low is None or figure.high is None:
        return f"{figure.value:.{digits}f}"
    return f"{figure.value:.{digits}f} ({figure.low:.{digits}f} - {figure.high:.{digits}f})"
