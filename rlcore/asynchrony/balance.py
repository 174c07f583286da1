"""Matches the rates of generation, environment and training, which share machine and rollouts.

The role that is busy while others idle is the bottleneck, and what may help it is tried, one change at
a time: measure, change, let it settle, measure again. A change is kept when what is trained in a second
has risen by more than the noise, or, where cores can move between the roles, when it has not fallen and
the changed role needs less of its time for it, since it can then give a core away. Else it is taken
back, and tried again after a time that doubles. Nothing is assumed of how the rates depend on the
settings but one thing, which spares moves of cores that cannot pay: that a role is at most as many times
faster as it has more cores.

On simulated plants with 8 cores that start far from it, 90 % of the best rate was reached after 36 to 88
windows, with noise of 10 % a window after 225 to 594; so start from settings that are not far from it.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace

from rlcore.asynchrony.comparison import GAIN, fell, rose
from rlcore.asynchrony.role_windows import RoleWindow
from rlcore.asynchrony.setting import MOVES, OPPOSITE, Bounds, Setting

MEASURED = 5
"""Windows in a measurement, before a change and after it."""

SETTLE = 2
"""Windows left out after a change: rollouts started before it are still under way."""

FULL = 0.8
"""Busy share from which a role is at its limit. When none is, rollouts are missing."""

GAP = 0.15
"""Busy share by which one role has to lead for it to be the bottleneck; below it rates are matched."""

QUEUED = 2.0
"""Rollouts waiting for the environment on average, from which fewer may run without it ever idling."""

FIRST_WAIT, LONGEST_WAIT = 16, 256
"""Windows until a change that was taken back is tried again; doubled each time. At the longest wait, a few
in a hundred windows are spent on tries, and a plant that has changed is noticed."""


@dataclass(frozen=True)
class Window:
    """A span with some updates in it; one without any measures no rate."""

    generator: RoleWindow
    environment: RoleWindow
    """Its queue is of rollouts."""
    trainer: RoleWindow
    """Its throughput, in any unit, is what is maximised."""


@dataclass(frozen=True)
class BalanceDecision:
    setting: Setting
    changed: bool
    reason: str


@dataclass
class _Trial:
    move: str
    before: Setting
    windows: list[Window]
    """Before the change."""
    left: int
    """Windows to come, those to settle included."""


class Balance:
    """``observe`` once a window: the setting for the next one out."""

    def __init__(self, setting: Setting, bounds: Bounds) -> None:
        """Starts at ``setting``. Raises UsageError when it is out of bounds."""
        bounds.check(setting)
        self.bounds = bounds
        self.setting = setting
        self._windows: deque[Window] = deque(maxlen=MEASURED)
        """With the present setting."""
        self._trial: _Trial | None = None
        self._tick = 0
        self._due: dict[str, int] = {}
        """Move -> window from which it may be tried."""
        self._waits: dict[str, int] = {}
        """Move -> windows that it waited last."""

    def observe(self, window: Window) -> BalanceDecision:
        self._tick += 1
        if self._trial is not None:
            return self._tried(self._trial, window)
        self._windows.append(window)
        if len(self._windows) < MEASURED:
            return BalanceDecision(self.setting, False, "measuring")
        bottleneck = self._bottleneck()
        for move in MOVES[bottleneck]:
            setting = self.bounds.moved(self.setting, move)
            due = self._tick >= self._due.get(move, 0)
            if setting == self.setting or not due or not self._can_pay(move, setting):
                continue
            self._trial = _Trial(move, self.setting, list(self._windows), SETTLE + MEASURED)
            self.setting = setting
            self._windows.clear()
            return BalanceDecision(setting, True, f"{bottleneck}: trying {move}")
        return BalanceDecision(self.setting, False, bottleneck)

    def fix_cores(self, generation: int, training: int) -> None:
        """Cores could not be moved: these are the roles', and stay so. A trial of it is over."""
        trial, cores = self._trial, {"generation_cores": generation, "training_cores": training}
        self.bounds = Bounds(
            replace(self.bounds.least, **cores), replace(self.bounds.most, **cores)
        )
        self.setting = replace(self.setting, **cores)
        if trial is not None and trial.move.startswith("core"):
            self._trial = None
        self._windows.clear()

    def _tried(self, trial: _Trial, window: Window) -> BalanceDecision:
        trial.left -= 1
        if trial.left < MEASURED:
            self._windows.append(window)
        if trial.left > 0:
            return BalanceDecision(self.setting, False, f"trying {trial.move}")
        self._trial = None
        if self._keeps(trial):
            self._waits.pop(trial.move, None)
            self._postpone(OPPOSITE[trial.move])
            return BalanceDecision(self.setting, False, f"{trial.move} kept")
        self._postpone(trial.move)
        self.setting = trial.before
        self._windows.clear()
        return BalanceDecision(self.setting, True, f"{trial.move} taken back: no gain")

    def _keeps(self, trial: _Trial) -> bool:
        before = [w.trainer.throughput for w in trial.windows]
        after = [w.trainer.throughput for w in self._windows]
        if rose(before, after):
            return True
        if trial.move.startswith("core") or fell(before, after):
            return False
        if trial.move == "less concurrency":
            return True
        if not self.bounds.cores_move:
            return False
        return rose(_speeds(trial.windows, trial.move), _speeds(self._windows, trial.move))

    def _postpone(self, move: str) -> None:
        wait = min(LONGEST_WAIT, 2 * self._waits.get(move, FIRST_WAIT // 2))
        self._waits[move] = wait
        self._due[move] = self._tick + wait

    def _busy(self) -> tuple[float, float, float]:
        """Mean shares of generator, environment and trainer."""
        return (
            statistics.fmean(w.generator.busy for w in self._windows),
            statistics.fmean(w.environment.busy for w in self._windows),
            statistics.fmean(w.trainer.busy for w in self._windows),
        )

    def _bottleneck(self) -> str:
        generator, environment, trainer = self._busy()
        if max(generator, environment, trainer) < FULL:
            return "rollouts are missing"
        if environment >= max(generator, trainer) + GAP:
            return "environment-bound"
        if generator >= trainer + GAP:
            return "generation-bound"
        return "training-bound" if trainer >= generator + GAP else "matched"

    def _can_pay(self, move: str, setting: Setting) -> bool:
        """For cores: were each role as fast as it has cores, would the slower one be faster?"""
        if move == "less concurrency":
            return statistics.fmean(w.environment.queue for w in self._windows) > QUEUED
        if not move.startswith("core"):
            return True
        generator, _, trainer = self._busy()
        generation = setting.generation_cores / self.setting.generation_cores / max(generator, 1e-6)
        training = setting.training_cores / self.setting.training_cores / max(trainer, 1e-6)
        return min(generation, training) > (1 + GAIN) / max(generator, trainer)

    def state(self) -> dict[str, object]:
        """Of a trial under way only the setting before it is kept."""
        setting = self.setting if self._trial is None else self._trial.before
        due = {move: tick - self._tick for move, tick in self._due.items()}
        return {"setting": asdict(setting), "due": due, "waits": dict(self._waits)}

    def load_state(self, state: dict) -> None:
        """The bounds may be others on this machine: what is outside is brought inside."""
        self.setting = self.bounds.clipped(Setting(**state["setting"]), self.setting)
        self._windows.clear()
        self._trial = None
        self._tick = 0
        self._due = dict(state["due"])
        self._waits = dict(state["waits"])


def _speeds(windows: Sequence[Window], move: str) -> list[float]:
    """What the role that a change is about does in a second at work."""
    roles = [w.trainer if "micro-batch" in move else w.generator for w in windows]
    return [role.throughput / max(role.busy, 1e-6) for role in roles]
