"""The picture of a sweep: tokens/s, what speculation gains, acceptance and drafts over concurrency."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
from matplotlib.axes import Axes

from clients.bench.figures import Interval
from clients.bench.plot_style import COLOURS, INK, RED, clean
from clients.bench.sweep_figures import LevelFigures
from clients.bench.sweep_report import PLAIN, SweepResults

LEAST_RATIO = 0.97
"""Speculation never costs: tokens/s over plain vLLM's must not fall below."""

Curves = Mapping[str, Mapping[int, Interval | None]]
"""By mode, a figure at each concurrency."""


def plot(path: Path, results: SweepResults, *, subtitle: str) -> None:
    """Bars are 95 % intervals."""
    figures = results.levels
    levels = sorted({f.concurrency for f in figures})
    panes, grid = plt.subplots(2, 2, sharex=True, figsize=(11, 7.5), layout="constrained")
    (speed, gain), (accepted, drafted) = grid
    draw(speed, {m: {f.concurrency: f.tokens_per_second for f in fs} for m, fs in by_mode(figures)})
    draw(gain, over_plain(results))
    gain.axhline(1.0, color=INK, lw=1.0, zorder=1.5)
    gain.axhline(LEAST_RATIO, color=RED, lw=0.9, ls="--", zorder=1.5)
    draw(
        accepted,
        {m: {f.concurrency: f.acceptance_length for f in fs} for m, fs in by_mode(figures)},
    )
    draw(drafted, {m: {f.concurrency: f.mean_k for f in fs} for m, fs in by_mode(figures)})
    speed.set_ylabel("output tokens/s")
    speed.set_ylim(0)
    gain.set_ylabel(f"tokens/s over {PLAIN}'s\n(dashed: {LEAST_RATIO})")
    accepted.set_ylabel("acceptance length\n(tokens per step with a draft)")
    drafted.set_ylabel("mean K\n(drafts verified per decode step)")
    drafted.set_ylim(bottom=-0.05)
    for axes in grid.flat:
        clean(axes)
        axes.set_xscale("log", base=2)
        axes.set_xticks(levels, [str(level) for level in levels])
        axes.minorticks_off()
    for axes in (accepted, drafted):
        axes.set_xlabel("requests at a time")
    speed.legend(loc="upper left", frameon=False, fontsize=9)
    panes.suptitle(
        "Same requests, one run: speed and drafts by concurrency",
        x=0.01,
        ha="left",
        fontsize=13,
        fontweight="bold",
        color=INK,
    )
    speed.set_title(subtitle, loc="left", fontsize=8.5, color="#5a6070", pad=12)
    panes.savefig(path, dpi=150, format="png")
    plt.close(panes)


def by_mode(figures: Sequence[LevelFigures]) -> list[tuple[str, list[LevelFigures]]]:
    return [(mode, [f for f in figures if f.mode == mode]) for mode in COLOURS]


def over_plain(results: SweepResults) -> dict[str, dict[int, Interval | None]]:
    """Each mode's tokens/s over those without speculation."""
    return {
        mode: {
            r.concurrency: r.tokens_per_second
            for r in results.ratios
            if r.mode == mode and r.base == PLAIN
        }
        for mode in COLOURS
    }


def draw(axes: Axes, curves: Curves) -> None:
    """Modes without a figure at any level have no line."""
    for mode, curve in curves.items():
        known = {level: value for level, value in sorted(curve.items()) if value is not None}
        if not known:
            continue
        values = [v.value for v in known.values()]
        below = [0.0 if v.low is None else max(0.0, v.value - v.low) for v in known.values()]
        above = [0.0 if v.high is None else max(0.0, v.high - v.value) for v in known.values()]
        axes.errorbar(
            list(known),
            values,
            yerr=[below, above],
            color=COLOURS[mode],
            label=mode,
            marker="o",
            ms=4,
            lw=1.8,
            elinewidth=1.0,
            capsize=2,
        )
