"""The report of ``paceline bench sweep``: its JSON and its tables.

Fields of the JSON, beside those that ``clients.bench.report`` lists and that say the same here
(``machine``, ``load_average_after``, ``options``, ``modes``, ``skipped``, ``blocks``, ``samples``,
``readings``, ``records``, ``changes``, ``final_status``, ``stopped``). An interval is
``{value, low, high, blocks}``, a bootstrap over blocks at 95 %; with few blocks (four, unless --rounds
says otherwise) it is rather too narrow.

===========  =========================================================================================
``levels``   by concurrency and mode: ``clients.bench.sweep_figures.LevelFigures``
``ratios``   by concurrency: online (else the last mode) over each other mode, and the others over
             ``none``, on the blocks that both had: ``clients.bench.sweep_figures.LevelRatio``
===========  =========================================================================================
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

import msgspec

from clients.bench import common
from clients.bench.latency import Percentiles
from clients.bench.plan import ONLINE
from clients.bench.report import show
from clients.bench.run_json import run_json
from clients.bench.runner import BlockRecords
from clients.bench.samples import Change, Reading, Sample, changes_of
from clients.bench.session import Session
from clients.bench.sweep_figures import LevelFigures, LevelRatio, level_figures, level_ratio

PLAIN = "none"
"""The mode that speculation must not fall behind."""


class SweepResults(msgspec.Struct, kw_only=True):
    """What a sweep found, by rising concurrency."""

    levels: list[LevelFigures]
    ratios: list[LevelRatio]
    changes: list[Change]


def results_of(
    modes: Sequence[str],
    samples: Sequence[Sample],
    records: Sequence[BlockRecords],
    readings: Sequence[Reading],
) -> SweepResults:
    """Of the levels that were reached."""
    levels = sorted({sample.concurrency for sample in samples})
    ratios = [level_ratio(samples, level, *pair) for level in levels for pair in pairs(modes)]
    return SweepResults(
        levels=[level_figures(samples, records, level, mode) for level in levels for mode in modes],
        ratios=[found for found in ratios if found is not None],
        changes=changes_of(readings),
    )


def pairs(modes: Sequence[str]) -> list[tuple[str, str]]:
    """(mode, base): ours over each other one, and each other one over no speculation."""
    ours = ONLINE if ONLINE in modes else modes[-1]
    others = [mode for mode in modes if mode != ours]
    plain = [(mode, PLAIN) for mode in others if mode != PLAIN] if PLAIN in others else []
    return [(ours, base) for base in others] + plain


def as_json(args: argparse.Namespace, session: Session, results: SweepResults) -> dict[str, Any]:
    return {
        "benchmark": "sweep",
        **run_json(args, session),
        **msgspec.structs.asdict(results),
    }


def print_results(results: SweepResults, skipped: Sequence[str]) -> None:
    common.print_table(
        "Speed by concurrency (95 % intervals over blocks)",
        ["concurrency", "mode", "requests", "tokens/s"],
        [
            [
                str(f.concurrency),
                f.mode,
                f"{f.requests}, {f.failed} failed" if f.failed else f.requests,
                show(f.tokens_per_second, 1),
            ]
            for f in results.levels
        ],
    )
    common.print_table(
        "Drafts by concurrency",
        ["concurrency", "mode", "acceptance length", "tokens per step", "mean K"],
        [
            [
                str(f.concurrency),
                f.mode,
                show(f.acceptance_length, 2),
                show(f.tokens_per_step, 2),
                "-" if f.mean_k is None else f"{f.mean_k.value:.2f}",
            ]
            for f in results.levels
        ],
    )
    common.print_table(
        "Latency by concurrency, ms: p50 / p95 / p99, of a request's time per token p50",
        ["concurrency", "mode", "first token", "between chunks", "per token"],
        [
            [
                str(f.concurrency),
                f.mode,
                show_times(f.first_token_s),
                show_times(f.gap_s),
                "-" if f.token_s is None else milliseconds(f.token_s.p50.value),
            ]
            for f in results.levels
        ],
    )
    if results.ratios:
        common.print_table(
            "Ratios on the same requests",
            ["concurrency", "", "tokens/s", "of a stream"],
            [
                [
                    str(r.concurrency),
                    f"{r.mode} / {r.base}",
                    show(r.tokens_per_second),
                    show(r.stream_tokens_per_second, 2),
                ]
                for r in results.ratios
            ],
        )
    for line in skipped:
        common.console.print(line)


def show_times(times: Percentiles | None) -> str:
    if times is None:
        return "-"
    return " / ".join(milliseconds(p.value) for p in (times.p50, times.p95, times.p99))


def milliseconds(seconds: float) -> str:
    """Four characters where that is enough."""
    value = seconds * 1000
    return f"{value:.1f}" if value < 100 else f"{value:.0f}"
