"""The laboratory's results: a JSON file that grows by one entry at a time, and its Markdown table."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import msgspec

from learner.lab_data import LaboratoryError


class Result(msgspec.Struct, frozen=True):
    """One variant, trained with one seed on so many output positions, and judged."""

    variant: str
    seed: int
    tokens: int
    """Trained positions asked for; ``trained`` were really trained, whole updates."""
    trained: int
    updates: int
    length: float
    """Acceptance length on held-out traffic from every anchor, bonus token included."""
    length_error: float
    """Its standard error, the span being the unit."""
    walked: float
    """The same over the steps that an engine would take: the estimate of the live figure."""
    rates: list[float]
    """Conditional acceptance by draft position, over every anchor."""
    loss: float
    """Mean of the updates since the judgement before; compares only runs of one variant."""
    positions_per_second: float
    """Trained positions a second of training (judging not counted), with whatever else ran."""


class Table:
    """The file. ``facts`` say what the results rest on; a file of other facts is refused."""

    def __init__(self, path: Path, facts: dict[str, Any]) -> None:
        self.path = path
        self.facts = facts
        self.results: list[Result] = []
        if path.exists():
            found = json.loads(path.read_text())
            if found["facts"] != facts:
                raise LaboratoryError(
                    f"{path} holds results on other traffic or another judgement; give a new file"
                )
            self.results = msgspec.convert(found["results"], list[Result])

    def has(self, variant: str, seed: int, tokens: int) -> bool:
        return any((r.variant, r.seed, r.tokens) == (variant, seed, tokens) for r in self.results)

    def add(self, result: Result) -> None:
        """Written at once, so that a run that is cut off loses nothing that it finished."""
        self.results.append(result)
        content = {"facts": self.facts, "results": msgspec.to_builtins(self.results)}
        part = self.path.with_suffix(".part")
        part.write_text(json.dumps(content, indent=1))
        os.replace(part, self.path)


def markdown(results: Sequence[Result], notes: dict[str, str]) -> str:
    """Variants by their length at the most tokens, best first; several seeds as mean and spread."""
    counts = sorted({r.tokens for r in results})
    found: dict[str, dict[int, list[Result]]] = {}
    for result in results:
        found.setdefault(result.variant, {}).setdefault(result.tokens, []).append(result)

    def merit(variant: str) -> tuple[int, float]:
        most = max(found[variant])
        return most, fmean(r.length for r in found[variant][most])

    heads = [f"{count:,} tokens" for count in counts]
    lines = [
        f"| variant | what | {' | '.join(heads)} | walked | by position | positions/s |",
        "|" + " --- |" * (5 + len(heads)),
    ]
    for variant in sorted(found, key=merit, reverse=True):
        runs = found[variant]
        last = runs[max(runs)]
        rates = [fmean(column) for column in zip(*(r.rates for r in last), strict=True)]
        cells = [
            variant,
            notes.get(variant, ""),
            *(_lengths(runs.get(count, [])) for count in counts),
            f"{fmean(r.walked for r in last):.3f}",
            " ".join(f"{rate:.3f}" for rate in rates),
            f"{fmean(r.positions_per_second for r in last):.0f}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _lengths(runs: Sequence[Result]) -> str:
    if not runs:
        return ""
    if len(runs) == 1:
        return f"{runs[0].length:.3f}"
    return f"{fmean(r.length for r in runs):.3f} ± {stdev(r.length for r in runs):.3f}"
