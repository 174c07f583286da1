"""How a CPU's cores are shared between the trainer and a server on the same machine."""

from __future__ import annotations

import math
import os

import torch

from rlcore.rl.settings import RLTrainSettings


def set_threads(settings: RLTrainSettings) -> int:
    """Give the trainer its threads, half the cores unless told otherwise; returns their number."""
    threads = settings.optimiser.threads or math.ceil(_cores() / 2)
    torch.set_num_threads(threads)
    return threads


def engine_threads(settings: RLTrainSettings, trainer: int) -> int:
    """Of a server on this machine: what the trainer leaves, unless told otherwise."""
    return settings.engine.threads or max(1, _cores() - trainer)


def _cores() -> int:
    return len(os.sched_getaffinity(0))
