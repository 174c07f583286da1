"""How a CPU's cores are shared between the trainer and an engine on the same machine."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from rlcore.cores import computing, usable
from rlcore.log import get_logger
from rlcore.rl.settings import RLTrainSettings

log = get_logger("rl")


@dataclass(frozen=True)
class CoreSplit:
    """At the start. Together they may be more than there are: who waits leaves a core to the other."""

    engine: int
    trainer: int
    shared: bool
    """Whether both compute on cores of this machine, so that one can go from the one to the other."""

    @property
    def most_engine(self) -> int:
        """That the engine can be given, one being the trainer's."""
        return max(self.engine, min(self._all - 1, computing()))

    @property
    def most_trainer(self) -> int:
        return max(self.trainer, min(self._all - 1, usable()))

    @property
    def _all(self) -> int:
        return self.engine + self.trainer


def split_cores(settings: RLTrainSettings) -> CoreSplit:
    """As told, else half for each."""
    trainer = settings.optimiser.threads or math.ceil(usable() / 2)
    engine = engine_cores(settings.engine.threads) or max(1, usable() - trainer)
    return CoreSplit(engine, trainer, settings.engine.url is None and _on_a_cpu(settings))


def engine_cores(asked: int | None) -> int | None:
    """``engine.threads``, but no more than there are: a file may come from a larger machine."""
    if asked is None or asked <= usable():
        return asked
    log.warning("engine.threads is more than there are cores", asked=asked, taken=usable())
    return usable()


def _on_a_cpu(settings: RLTrainSettings) -> bool:
    """Trainer and engine both; an engine takes a GPU where there is one."""
    return settings.optimiser.device in ("auto", "cpu") and not torch.cuda.is_available()
