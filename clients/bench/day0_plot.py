"""The day-0 picture: acceptance length and tokens/s over minutes, a line at each new drafter."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt

from clients.bench.plot_style import GREY, INK, clean, label_versions

BLUE, TEAL = "#2457c5", "#12826e"


class CurvePoint(Protocol):
    time: float
    acceptance_length: float | None
    tokens_per_step: float | None
    tokens_per_second: float


class VersionChange(Protocol):
    time: float
    version: int


def plot(
    path: Path,
    points: Sequence[CurvePoint],
    changes: Sequence[VersionChange],
    *,
    goal: float | None,
    window: int,
    subtitle: str,
) -> None:
    """Write the picture; a gap in the curves is a time without traffic."""
    minutes = [p.time / 60 for p in points]
    figure, (top, low) = plt.subplots(
        2, 1, sharex=True, figsize=(10, 6.2), height_ratios=[2.2, 1], layout="constrained"
    )
    top.plot(
        minutes,
        _values(p.acceptance_length if p.tokens_per_second else None for p in points),
        color=BLUE,
        lw=2.2,
        label="acceptance length",
    )
    top.plot(
        minutes,
        _values(p.tokens_per_step if p.tokens_per_second else None for p in points),
        color=BLUE,
        lw=1.2,
        ls=(0, (4, 2)),
        alpha=0.6,
        label="tokens per target step",
    )
    if goal is not None:
        top.axhline(goal, color=INK, lw=0.9, ls=":", label=f"goal {goal:g}")
    top.set_ylabel(f"tokens per step\n(last {window} requests)")
    bottom = top.get_ylim()[0]
    top.set_ylim(min(1.0, bottom))
    top.legend(loc="upper left", frameon=False)
    low.plot(minutes, [p.tokens_per_second for p in points], color=TEAL, lw=1.8)
    low.set_ylim(0)
    low.set_ylabel("output tokens/s\n(last 30 s)")
    low.set_xlabel("minutes since the server began to serve")
    for axes in (top, low):
        clean(axes)
        for change in changes:
            axes.axvline(change.time / 60, color=GREY, lw=0.9, zorder=0)
    label_versions(top, [(c.time / 60, c.version, INK) for c in changes])
    low.set_xlim(0, max([*minutes, 0.1]))
    figure.suptitle(
        "Day 0: the drafter learns from the traffic it serves",
        x=0.01,
        ha="left",
        fontsize=13,
        fontweight="bold",
        color=INK,
    )
    top.set_title(subtitle, loc="left", fontsize=8.5, color="#5a6070", pad=18)
    figure.savefig(path, dpi=150, format="png")
    plt.close(figure)


def _values(values: Any) -> list[float]:
    return [math.nan if value is None else value for value in values]
