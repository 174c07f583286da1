"""The controllers of a run: what they observe after each update, and what they set."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

from rlcore.asynchrony.balance import Balance, Window
from rlcore.asynchrony.length_alarm import LengthWatch
from rlcore.asynchrony.setting import Bounds, Setting
from rlcore.asynchrony.temperature import TemperatureControl, UpdateSample
from rlcore.generator.base import GeneratorError
from rlcore.log import get_logger
from rlcore.records.trace import Sampling
from rlcore.rl.learn import PolicyLearner
from rlcore.rl.rollouts import RolloutFloor
from rlcore.rl.settings import RLTrainSettings
from rlcore.rl.tally import Tally
from rlcore.rl.threads import CoreSplit

log = get_logger("rl")

MOST_CONCURRENCY = 4
"""Times the configured concurrency that the balance may go up to."""

LEAST_MICRO_BATCH = 1024
"""Tokens that the balance may go down to: fewer do not fill a core."""


class Steering:
    """``begin`` once, when the engine is up and after ``load_state``; then ``observe``."""

    def __init__(
        self,
        settings: RLTrainSettings,
        floor: RolloutFloor,
        learner: PolicyLearner,
        split: CoreSplit,
        compute_on: Callable[[int], Awaitable[None]],
    ) -> None:
        """``compute_on``: gives the engine so many cores; raises GeneratorError."""
        self._adapts_temperature = settings.sampling.adapt_temperature
        self._balances = settings.balance
        self._floor = floor
        self._learner = learner
        self._start = settings.sampling.temperature
        self._temperature = TemperatureControl(self._start if self._adapts_temperature else 1.0)
        self._length = LengthWatch()
        self._balance = _balance(settings, split)
        self._shared = split.shared
        self._compute_on = compute_on
        self._engine_cores = split.engine
        """That the engine has."""
        self._apply()

    async def begin(self) -> None:
        """Give the engine the cores that it had when the run was left."""
        await self._move_cores()

    async def observe(self, tally: Tally, window: Window) -> dict[str, float]:
        """After an update; the figures of what was decided."""
        alarm = self._length.observe(tally.length, tally.accuracy)
        if alarm.changed:
            told = log.warning if alarm.on else log.info
            told("length alarm" if alarm.on else "the length alarm is over", reason=alarm.reason)
        if self._adapts_temperature:
            sample = UpdateSample(tally.entropy, tally.groups, tally.all_right, tally.all_wrong)
            decision = self._temperature.observe(sample)
            if decision.changed:
                log.info("sampling temperature", change=decision.reason)
        if self._balances:
            balance = self._balance.observe(window)
            if balance.changed:
                log.info("balance", change=balance.reason)
        self._apply()
        await self._move_cores()
        figures = {
            "length_alarm": float(alarm.on),
            "temperature": self._floor.sampling.temperature,
            "concurrency": float(self._floor.concurrency),
            "micro_batch_tokens": float(self._learner.micro_batch_tokens),
        }
        if self._shared:
            figures["generation_cores"] = float(self._engine_cores)
            figures["training_cores"] = float(self._learner.threads)
        return figures

    async def _move_cores(self) -> None:
        """The trainer's follow the engine's; where those stay, the balance is told so."""
        setting = self._balance.setting
        if not (self._balances and self._shared and setting.generation_cores != self._engine_cores):
            return
        try:
            await self._compute_on(setting.generation_cores)
        except GeneratorError as error:
            log.warning("cores stay where they are from now on", reason=str(error))
            self._balance.fix_cores(self._engine_cores, self._learner.threads)
            return
        self._engine_cores = setting.generation_cores
        self._learner.threads = setting.training_cores

    def _apply(self) -> None:
        adapted = self._temperature.temperature if self._adapts_temperature else self._start
        self._floor.sampling = Sampling(temperature=adapted)
        if self._balances:
            self._floor.concurrency = self._balance.setting.concurrency
            self._learner.micro_batch_tokens = self._balance.setting.micro_batch_tokens

    def state(self) -> dict[str, Any]:
        return {
            "temperature": self._temperature.state(),
            "length": self._length.state(),
            "balance": self._balance.state(),
        }

    def load_state(self, state: dict[str, Any]) -> None:
        self._temperature.load_state(state["temperature"])
        self._length.load_state(state["length"])
        self._balance.load_state(state["balance"])
        self._apply()


def _balance(settings: RLTrainSettings, split: CoreSplit) -> Balance:
    """No micro-batch is larger than the one that was configured, which may be all that fits."""
    tokens, concurrency = settings.optimiser.micro_batch_tokens, settings.concurrency
    start = Setting(concurrency, split.engine, split.trainer, tokens)
    least = Setting(settings.group_size, 1, 1, min(tokens, LEAST_MICRO_BATCH))
    most = Setting(MOST_CONCURRENCY * concurrency, split.most_engine, split.most_trainer, tokens)
    if not split.shared:
        fixed = {"generation_cores": split.engine, "training_cores": split.trainer}
        least, most = replace(least, **fixed), replace(most, **fixed)
    return Balance(start, Bounds(least, most))
