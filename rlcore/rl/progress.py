"""What a person sees of a run while it goes on: one line an update, and a bar under them."""

from __future__ import annotations

from collections.abc import Mapping
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bar

from rlcore.rl.evaluate import Evaluation

SHOWN = (
    ("reward", "reward", "{:.2f}"),
    ("accuracy", "right", "{:.0%}"),
    ("length", "tokens", "{:.0f}"),
    ("generator/throughput", "tok/s", "{:.0f}"),
    ("acceptance_length", "accepted", "{:.2f}"),
    ("staleness", "stale", "{:.1f}"),
    ("policy_entropy", "entropy", "{:.2f}"),
    ("mismatch_kl_on_policy", "mismatch", "{:.0e}"),
)
"""(figure, what it is called here, format)"""


class Progress:
    def __init__(self, updates: int) -> None:
        self._console = Console(stderr=True, highlight=False)
        self._bar = Bar(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            console=self._console,
        )
        self._task = self._bar.add_task("update", total=updates)

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        self._bar.stop()

    def update(self, version: int, figures: Mapping[str, float]) -> None:
        """One more update was taken."""
        parts = [
            f"{label} {form.format(figures[name])}"
            for name, label, form in SHOWN
            if name in figures
        ]
        self._console.print(f"{version:5d}  {figures['seconds']:5.1f} s  " + "  ".join(parts))
        self._bar.update(self._task, completed=version)

    def evaluated(self, version: int, result: Evaluation) -> None:
        self._console.print(
            f"{version:5d}  held out: {result.accuracy:.1%} right (standard error "
            f"{result.standard_error:.1%}, {result.tasks} tasks x {result.samples})"
        )
