"""What the balance of the roles can set, the single changes of it, and which may help when."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, replace

from rlcore.errors import UsageError

MORE, LESS = 1.5, 0.8
"""Factors of a change of concurrency: up fast, for a pipeline starts nearly empty; down gently."""

OPPOSITE = {
    "more concurrency": "less concurrency",
    "less concurrency": "more concurrency",
    "core to generation": "core to training",
    "core to training": "core to generation",
    "larger micro-batch": "smaller micro-batch",
    "smaller micro-batch": "larger micro-batch",
}
"""The changes, and what takes each back."""


MOVES = {
    "rollouts are missing": ["more concurrency"],
    "generation-bound": ["more concurrency", "core to generation", "larger micro-batch"],
    "training-bound": [
        "larger micro-batch", "core to training", "smaller micro-batch", "more concurrency",
    ],
    "environment-bound": ["less concurrency"],
    "matched": ["larger micro-batch", "more concurrency"],
}  # fmt: skip
"""What may help, by bottleneck, in the order in which it is tried. Where cores can move, making the other
role faster helps too: it can give one away then. Nothing here makes an environment faster; fewer
rollouts that wait for it are fresher ones at the same rate."""


@dataclass(frozen=True)
class Setting:
    concurrency: int
    """Rollouts running at once."""
    generation_cores: int
    training_cores: int
    micro_batch_tokens: int


@dataclass(frozen=True)
class Bounds:
    """Raises UsageError when they are not in order.

    Where the roles share no machine, bounds that are one number keep their cores as they are.
    """

    least: Setting
    most: Setting

    def __post_init__(self) -> None:
        self.check(self.least)

    @property
    def cores_move(self) -> bool:
        """Whether a core can go from one role to the other."""
        return (
            self.least.generation_cores < self.most.generation_cores
            and self.least.training_cores < self.most.training_cores
        )

    def check(self, setting: Setting) -> None:
        """Raises UsageError when a number is outside."""
        for name, value in asdict(setting).items():
            low, high = asdict(self.least)[name], asdict(self.most)[name]
            if not 1 <= low <= value <= high:
                raise UsageError(
                    f"{name} {value} is not in [{low}, {high}], or the bounds are below 1"
                )

    def moved(self, setting: Setting, move: str) -> Setting:
        """``setting`` after one change of OPPOSITE; as it was where that would leave the bounds."""
        least, most, tokens = self.least, self.most, setting.micro_batch_tokens
        if move == "more concurrency":
            more = min(most.concurrency, math.ceil(MORE * setting.concurrency))
            return replace(setting, concurrency=more)
        if move == "less concurrency":
            less = max(least.concurrency, math.floor(LESS * setting.concurrency))
            return replace(setting, concurrency=less)
        if move == "larger micro-batch":
            return replace(setting, micro_batch_tokens=min(most.micro_batch_tokens, 2 * tokens))
        if move == "smaller micro-batch":
            return replace(setting, micro_batch_tokens=max(least.micro_batch_tokens, tokens // 2))
        step = 1 if move == "core to generation" else -1
        generation, training = setting.generation_cores + step, setting.training_cores - step
        if (
            least.generation_cores <= generation <= most.generation_cores
            and least.training_cores <= training <= most.training_cores
        ):
            return replace(setting, generation_cores=generation, training_cores=training)
        return setting

    def clipped(self, saved: Setting, cores_of: Setting) -> Setting:
        """``saved`` within the bounds, with the cores of ``cores_of`` unless both have as many."""
        low, high = asdict(self.least), asdict(self.most)
        values = {k: min(high[k], max(low[k], v)) for k, v in asdict(saved).items()}
        clipped = Setting(**values)
        cores = clipped.generation_cores + clipped.training_cores
        if cores == cores_of.generation_cores + cores_of.training_cores:
            return clipped
        return replace(
            clipped,
            generation_cores=cores_of.generation_cores,
            training_cores=cores_of.training_cores,
        )
