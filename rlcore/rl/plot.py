"""Curves of one or more runs: python -m rlcore.rl.plot RUN... --out curves.png (needs matplotlib)."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rlcore.errors import UsageError
from rlcore.rl.sinks import METRICS

PANELS = (
    ("reward (line), held-out accuracy (points)", ("reward",), "eval/accuracy"),
    (
        "entropy in nats per token (-), share of equal groups (--)",
        ("policy_entropy", "equal_groups"),
        None,
    ),
    ("acceptance length", ("acceptance_length",), None),
    ("idle share: generator (-), trainer (--)", ("generator/idle", "trainer/idle"), None),
)
"""(title, figures drawn as lines, figure drawn with its standard error)"""

STYLES = ("-", "--")


def read(run: Path) -> list[dict[str, float]]:
    """The lines of a run's metrics, with the minutes since it began. Raises UsageError."""
    path = run / METRICS
    if not path.is_file():
        raise UsageError(f"{run} holds no {METRICS}; give the --out folder of a run")
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    minutes = 0.0
    for line in lines:
        minutes += line.get("seconds", 0.0) / 60
        line["minutes"] = minutes
    return lines


def series(lines: Sequence[dict[str, float]], name: str) -> tuple[list[float], list[float]]:
    """(minutes, values) where a figure is known."""
    known = [(line["minutes"], line[name]) for line in lines if name in line]
    return [m for m, _ in known], [v for _, v in known]


def draw(runs: Sequence[Path], out: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(2, 2, figsize=(11, 7), constrained_layout=True)
    for panel, (title, names, judged) in zip(panels.flat, PANELS, strict=True):
        for number, run in enumerate(runs):
            _draw_run(panel, read(run), run.name, f"C{number}", names, judged)
        panel.set_title(title, fontsize=10)
        panel.set_xlabel("minutes")
        panel.grid(alpha=0.3)
    panels.flat[0].legend(fontsize=8)
    figure.savefig(out, dpi=110)


def _draw_run(
    panel: Any,
    lines: list[dict[str, float]],
    label: str,
    colour: str,
    names: Sequence[str],
    judged: str | None,
) -> None:
    for name, style in zip(names, STYLES, strict=False):
        panel.plot(*series(lines, name), style, color=colour, alpha=0.7, linewidth=1.0)
    if judged is not None:
        minutes, values = series(lines, judged)
        _, errors = series(lines, "eval/standard_error")
        panel.errorbar(minutes, values, yerr=errors, marker="o", color=colour, label=label)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN")
    parser.add_argument("--out", type=Path, required=True, metavar="PNG")
    args = parser.parse_args()
    draw(args.runs, args.out)


if __name__ == "__main__":
    main()
