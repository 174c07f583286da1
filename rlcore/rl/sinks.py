"""Where a run's figures go: JSON lines and TensorBoard, both in its folder."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rlcore.errors import UsageError
from rlcore.log import get_logger

log = get_logger("rl")

METRICS = "metrics.jsonl"
TRAINED = "trained.jsonl"
SAMPLES = "samples.jsonl"


class Sinks:
    """``resumed_at``: the update that a resumed run goes on from; later lines are taken out."""

    def __init__(self, folder: Path, resumed_at: int | None) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ModuleNotFoundError:
            raise UsageError(
                "rl-train writes TensorBoard files and needs its package: pip install 'paceline[rl]'"
            ) from None

        self._folder = folder
        for name in (METRICS, TRAINED, SAMPLES):
            keep_until(folder / name, -1 if resumed_at is None else resumed_at)
        self._board = SummaryWriter(str(folder / "tensorboard"), purge_step=resumed_at)

    def metrics(self, update: int, figures: Mapping[str, float]) -> None:
        """Figures that are not finite are left out."""
        finite = {name: value for name, value in figures.items() if math.isfinite(value)}
        self._write(METRICS, {"update": update, **finite})
        try:
            for name, value in finite.items():
                self._board.add_scalar(name, value, update)
            self._board.flush()
        except OSError as error:
            self._lost("tensorboard", error)

    def trained(self, update: int, groups: Mapping[str, str]) -> None:
        """Which groups an update was taken on, and of which tasks they were."""
        self._write(TRAINED, {"update": update, "groups": groups})

    def samples(self, update: int, samples: list[dict[str, Any]]) -> None:
        """Some rollouts, for people to read."""
        for sample in samples:
            self._write(SAMPLES, {"update": update, **sample})

    def _write(self, name: str, line: Mapping[str, Any]) -> None:
        """A disk that is full costs lines, not the run."""
        try:
            with open(self._folder / name, "a") as file:
                file.write(json.dumps(line) + "\n")
        except OSError as error:
            self._lost(name, error)

    @staticmethod
    def _lost(name: str, error: OSError) -> None:
        log.error("a line of a log is lost", file=name, reason=error.strerror)

    def close(self) -> None:
        try:
            self._board.close()
        except OSError as error:
            self._lost("tensorboard", error)


def keep_until(path: Path, update: int) -> None:
    """Drop the lines of updates after this one, and one that was cut off."""
    if not path.exists():
        return
    kept = []
    for line in path.read_text().splitlines():
        try:
            if json.loads(line)["update"] <= update:
                kept.append(line + "\n")
        except (json.JSONDecodeError, KeyError, TypeError):
            continue
    partial = path.with_suffix(".partial")
    partial.write_text("".join(kept))
    partial.replace(path)
