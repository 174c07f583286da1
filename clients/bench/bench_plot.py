"""The picture of a bench run: acceptance length and tokens/s over the tokens that online served."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
from matplotlib.axes import Axes

from clients.bench.figures import Parts, length, throughput
from clients.bench.plot_style import COLOURS, GREY, INK, RED, clean, label_versions
from clients.bench.samples import Change, Sample

SHADE = "#f1f3f8"
SMOOTHED = 3
"""Blocks pooled in a point of a line; the blocks themselves are dots."""


def plot(
    path: Path, samples: Sequence[Sample], changes: Sequence[Change], *, subtitle: str
) -> None:
    """Measured windows are shaded, shifts are dark lines, swaps light ones, rollbacks red ones."""
    modes = [mode for mode in COLOURS if any(s.mode == mode for s in samples)]
    figure, (top, low) = plt.subplots(2, 1, sharex=True, figsize=(11, 7), layout="constrained")
    for mode in modes:
        mine = [s for s in samples if s.mode == mode]
        at = [positions(samples)[s.block] / 1000 for s in mine]
        _curve(top, at, mine, length, mode)
        _curve(low, at, mine, throughput, mode)
    top.set_ylabel("acceptance length\n(tokens per step with a draft)")
    low.set_ylabel("output tokens/s")
    low.set_ylim(0)
    low.set_xlabel("thousand tokens served by online")
    for axes in (top, low):
        clean(axes)
        _mark(axes, samples, changes)
    _label(top, samples, changes)
    low.legend(loc="lower right", frameon=False, ncols=len(modes), fontsize=9)
    figure.suptitle(
        "Same requests, one run: acceptance length and speed",
        x=0.01,
        ha="left",
        fontsize=13,
        fontweight="bold",
        color=INK,
    )
    top.set_title(subtitle, loc="left", fontsize=8.5, color="#5a6070", pad=30)
    figure.savefig(path, dpi=150, format="png")
    plt.close(figure)


def smoothed(samples: Sequence[Sample], parts: Parts) -> list[float]:
    """At each block, the figure over it and those before it in its phase; nan for none."""
    values = []
    for i, sample in enumerate(samples):
        window = [s for s in samples[max(0, i - SMOOTHED + 1) : i + 1] if s.phase == sample.phase]
        over, under = (sum(column) for column in zip(*map(parts, window), strict=True))
        values.append(over / under if under else math.nan)
    return values


def _curve(
    axes: Axes, at: Sequence[float], samples: Sequence[Sample], parts: Parts, mode: str
) -> None:
    dots = [over / under if under else math.nan for over, under in map(parts, samples)]
    axes.plot(at, dots, ".", color=COLOURS[mode], ms=4, alpha=0.35)
    axes.plot(at, smoothed(samples, parts), color=COLOURS[mode], lw=1.8, label=mode)


def positions(samples: Sequence[Sample]) -> dict[int, int]:
    """By block: tokens served when all its modes had had it, whichever went first."""
    found: dict[int, int] = {}
    for sample in samples:
        found[sample.block] = max(found.get(sample.block, 0), sample.lead_tokens)
    return found


def _mark(axes: Axes, samples: Sequence[Sample], changes: Sequence[Change]) -> None:
    for begin, end, _, measured in spans(samples):
        if measured:
            axes.axvspan(begin / 1000, end / 1000, color=SHADE, zorder=-2, lw=0)
    for change in changes:
        axes.axvline(
            change.tokens / 1000, color=RED if change.rollback else GREY, lw=0.9, zorder=-1
        )
    for begin in _shifts(samples)[1:]:
        axes.axvline(begin / 1000, color=INK, lw=1.3, zorder=0)


def _label(axes: Axes, samples: Sequence[Sample], changes: Sequence[Change]) -> None:
    for begin, name in zip(_shifts(samples), dict.fromkeys(s.phase for s in samples), strict=True):
        axes.annotate(
            f"{name} →",
            (begin / 1000, 1.0),
            xycoords=("data", "axes fraction"),
            xytext=(2, 14),
            textcoords="offset points",
            fontsize=9,
            fontweight="bold",
            color=INK,
        )
    label_versions(
        axes, [(c.tokens / 1000, c.version, RED if c.rollback else INK) for c in changes]
    )


def spans(samples: Sequence[Sample]) -> list[tuple[int, int, str, bool]]:
    """(begin, end, phase, measured) in online tokens, one after the other."""
    found: list[tuple[int, int, str, bool]] = []
    at = positions(samples)
    for sample in samples:
        key, end = (sample.phase, sample.measured), at[sample.block]
        if found and found[-1][2:] == key:
            found[-1] = (found[-1][0], end, *key)
        else:
            found.append((found[-1][1] if found else 0, end, *key))
    return found


def _shifts(samples: Sequence[Sample]) -> list[int]:
    """Where each phase begins, in online tokens."""
    begins: dict[str, int] = {}
    for begin, _, phase, _ in spans(samples):
        begins.setdefault(phase, begin)
    return list(begins.values())
