"""The controllers of a run: what they observe after each update, and what they set."""

from __future__ import annotations

from typing import Any

from rlcore.asynchrony.balance import Balance, Window
from rlcore.asynchrony.length_alarm import LengthWatch
from rlcore.asynchrony.setting import Bounds, Setting
from rlcore.asynchrony.temperature import TemperatureControl, UpdateSample
from rlcore.log import get_logger
from rlcore.records.trace import Sampling
from rlcore.rl.learn import PolicyLearner
from rlcore.rl.rollouts import RolloutFloor
from rlcore.rl.settings import RLTrainSettings
from rlcore.rl.tally import Tally

log = get_logger("rl")

MOST_CONCURRENCY = 4
"""Times the configured concurrency that the balance may go up to."""

LEAST_MICRO_BATCH = 1024
"""Tokens that the balance may go down to: fewer do not fill a core."""


class Steering:
    def __init__(
        self, settings: RLTrainSettings, floor: RolloutFloor, learner: PolicyLearner
    ) -> None:
        self._adapts_temperature = settings.sampling.adapt_temperature
        self._balances = settings.balance
        self._floor = floor
        self._learner = learner
        self._start = settings.sampling.temperature
        self._temperature = TemperatureControl(self._start if self._adapts_temperature else 1.0)
        self._length = LengthWatch()
        self._balance = _balance(settings)
        self._apply()

    def observe(self, tally: Tally, window: Window) -> dict[str, float]:
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
        return {
            "length_alarm": float(alarm.on),
            "temperature": self._floor.sampling.temperature,
            "concurrency": float(self._floor.concurrency),
            "micro_batch_tokens": float(self._learner.micro_batch_tokens),
        }

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


def _balance(settings: RLTrainSettings) -> Balance:
    """Cores stay where they are, for the engine's threads are fixed when it starts; and no micro-batch is
    larger than the one that was configured, which may be all that fits."""
    tokens, concurrency = settings.optimiser.micro_batch_tokens, settings.concurrency
    start = Setting(concurrency, 1, 1, tokens)
    least = Setting(settings.group_size, 1, 1, min(tokens, LEAST_MICRO_BATCH))
    most = Setting(MOST_CONCURRENCY * concurrency, 1, 1, tokens)
    return Balance(start, Bounds(least, most))
