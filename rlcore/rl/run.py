"""A run of policy RL: rollouts flow to the trainer, better policies flow back, until it is done."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Sequence
from typing import Any

from rlcore.asynchrony.admission import Admission
from rlcore.asynchrony.balance import Balance, Window
from rlcore.asynchrony.length_alarm import LengthWatch
from rlcore.asynchrony.role_windows import RoleMeter, RoleWindow
from rlcore.asynchrony.setting import Bounds, Setting
from rlcore.asynchrony.task_order import TaskOrder
from rlcore.asynchrony.temperature import TemperatureControl, UpdateSample
from rlcore.asynchrony.token_ledger import Fate, TokenLedger, effective_rate
from rlcore.environments.host import EnvironmentHost
from rlcore.errors import PacelineError
from rlcore.generator.base import Completion, GeneratorStatus
from rlcore.log import get_logger
from rlcore.records import PolicyManifest, Sampling
from rlcore.rl import saved as saving
from rlcore.rl.engine import Engine, Live
from rlcore.rl.episode import Limits
from rlcore.rl.evaluate import Evaluation, evaluate
from rlcore.rl.learn import BatchReport, PolicyLearner
from rlcore.rl.progress import Progress
from rlcore.rl.rollouts import Books, Roles, RolloutFloor
from rlcore.rl.settings import RLTrainSettings
from rlcore.rl.sinks import Sinks
from rlcore.rl.tally import Tally
from rlcore.rollout import Rollout
from rlcore.weights import PolicyStore

log = get_logger("rl")

STALL_WARNING = 120.0
"""Seconds without any change after which the log says what is waited for."""

STALL_DEADLINE = 1800.0
"""Seconds without any change that end the run: something hangs."""

KEPT_POLICIES = 2
"""Published versions whose weights stay on disk: the live one and the one before."""

SAMPLES_SHOWN = 4
"""Rollouts of each update that are written out for people."""

EVALUATION_PRIORITY = -(2**30)
"""Before every rollout."""


class RunError(PacelineError):
    """The run cannot go on."""


class Run:
    """``await run()`` once. Everything it needs is given; it closes none of it."""

    def __init__(
        self,
        settings: RLTrainSettings,
        base_id: str,
        learner: PolicyLearner,
        engine: Engine,
        host: EnvironmentHost,
        tokenizer: Any,
        resumed: saving.Saved | None,
    ) -> None:
        self._settings = settings
        self._base_id = base_id
        self._learner = learner
        self._engine = engine
        self._host = host
        self._tokenizer = tokenizer
        self._limits = Limits(
            settings.sampling.max_prompt_tokens,
            settings.sampling.max_tokens,
            settings.environment.max_turns,
        )
        self.books = Books(
            Admission(settings.max_off_policy_steps, settings.groups_per_update),
            TaskOrder(settings.seed, host.size("train")),
            TokenLedger(),
        )
        now = time.monotonic()
        self._roles = Roles(
            RoleMeter(now), RoleMeter(now, settings.environment.workers), RoleMeter(now)
        )
        self._temperature = TemperatureControl(settings.sampling.temperature)
        self._length_watch = LengthWatch()
        self._balance = _balance(settings)
        self._floor = RolloutFloor(
            self.books,
            self._roles,
            learner.recipe,
            host,
            tokenizer,
            self._sample,
            self._limits,
            settings.group_size,
            settings.concurrency,
        )
        if resumed is not None:
            self._restore(resumed)
        self._use_temperature()
        self._store = PolicyStore(settings.out / "policies")
        self._sinks = Sinks(settings.out, None if resumed is None else resumed.update)
        self._progress = Progress(settings.updates)
        self._started = self._updated = time.monotonic()
        self._totals = self.books.ledger.totals()
        self._status = GeneratorStatus(0, -1)
        self.evaluations: dict[int, Evaluation] = {}

    @property
    def version(self) -> int:
        return self.books.admission.version

    async def run(self) -> None:
        """Until all updates are done, or the time is up. Raises PacelineError."""
        try:
            with self._progress:
                if self.version:
                    await self._publish()
                self._status = await self._engine.status()
                await self._evaluate_if_due()
                await self._until_done()
        finally:
            self._sinks.close()

    async def _until_done(self) -> None:
        floor = asyncio.create_task(self._floor.run())
        trainer = asyncio.create_task(self._train())
        try:
            done, _ = await asyncio.wait({floor, trainer}, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        except BaseExceptionGroup as group:
            raise _first(group) from None
        finally:
            for task in (floor, trainer):
                task.cancel()
            await asyncio.gather(floor, trainer, return_exceptions=True)

    async def _train(self) -> None:
        while self.version < self._settings.updates and not self._time_is_up():
            batch = await self._next_batch()
            groups = {name: self._floor.finished.pop(name) for name in batch}
            report = await self._update(list(groups.values()))
            self._settle(groups, report)
            if not report.trained:
                log.warning("a batch led to no update", reasons=[u.skipped for u in report.updates])
                self._floor.wake()
                continue
            await self._publish()
            self._floor.wake()
            await self._after_update(groups, report)
        self._checkpoint()

    def _time_is_up(self) -> bool:
        minutes = self._settings.minutes
        return minutes is not None and time.monotonic() - self._started > 60 * minutes

    async def _next_batch(self) -> Sequence[str]:
        """The groups of the next update; raises RunError when nothing happens for too long."""
        quiet = time.monotonic()
        while True:
            batch = self.books.admission.take_batch()
            if batch:
                return batch
            if await self._floor.changed(STALL_WARNING):
                quiet = time.monotonic()
                await asyncio.sleep(0)
                continue
            waited = time.monotonic() - quiet
            log.warning(
                "no rollout ended for a while", seconds=round(waited), **self._waiting_for()
            )
            if waited > STALL_DEADLINE:
                raise RunError(
                    f"no rollout ended for {waited:.0f} s ({self._waiting_for()}); see server.log"
                )

    def _waiting_for(self) -> dict[str, Any]:
        admission = self.books.admission
        return {
            "running_groups": len(admission.running),
            "waiting_groups": len(admission.waiting),
            "needed": self._settings.groups_per_update,
        }

    async def _update(self, groups: list[list[Rollout]]) -> BatchReport:
        meter = self._roles.trainer
        meter.working(1, time.monotonic())
        try:
            report = await asyncio.to_thread(self._learner.train, groups, self.version)
        finally:
            meter.working(0, time.monotonic())
        meter.done(report.tokens, time.monotonic())
        meter.queued(len(self._floor.finished), time.monotonic())
        return report

    def _settle(self, groups: dict[str, list[Rollout]], report: BatchReport) -> None:
        books = self.books
        books.admission.trained(groups if report.trained else ())
        for name, group in groups.items():
            books.order.trained(int(name))
            equal = len({rollout.reward for rollout in group}) == 1
            learned = report.trained and not equal
            for rollout in group:
                fate = Fate.TRAINED if learned else Fate.ZERO_ADVANTAGE
                books.ledger.settled(rollout.rollout_id, {fate: rollout.sampled})

    async def _publish(self) -> float:
        """The trainer's policy goes live; seconds that the engine stood still for it."""
        version = self.version
        manifest = await asyncio.to_thread(self._write_policy, version)
        live = Live(version, self._store.folder(version), manifest.sha256)
        published = await self._engine.publish(live)
        self.books.ledger.reprefilled(published.reprefilled)
        self.books.admission.published(version)
        for old in self._store.versions()[:-KEPT_POLICIES]:
            self._store.remove(old)
        return published.stall_s

    def _write_policy(self, version: int) -> PolicyManifest:
        if version in self._store.versions():
            self._store.remove(version)
        parent = version - 1 if version else None
        seen = int(self._learner.trainer.weight_seen)
        manifest = PolicyManifest(version, parent, "", self._base_id, tokens_seen=seen)
        return self._store.publish(self._learner.snapshot(), self._learner.config(), manifest)

    async def _after_update(self, groups: dict[str, list[Rollout]], report: BatchReport) -> None:
        version, tally = self.version, self._floor.tally
        self._floor.tally = Tally()
        figures = tally.metrics() | report.metrics() | await self._rates(groups)
        self._adapt(tally, figures)
        self._sinks.metrics(version, figures)
        self._sinks.trained(version, {name: group[0].task_id for name, group in groups.items()})
        self._sinks.samples(version, self._shown([r for g in groups.values() for r in g]))
        self._progress.update(version, figures)
        await self._evaluate_if_due()
        if version % self._settings.checkpoint_every == 0:
            self._checkpoint()

    async def _rates(self, groups: dict[str, list[Rollout]]) -> dict[str, float]:
        """Speeds, idle shares, acceptance and staleness since the update before."""
        now = time.monotonic()
        windows = {name: meter.window(now) for name, meter in vars(self._roles).items()}
        totals, before = self.books.ledger.totals(), self._totals
        seconds, self._updated, self._totals = now - self._updated, now, totals
        span = totals.since(before)
        rate = effective_rate(span, seconds, len(os.sched_getaffinity(0)))
        status, last = await self._engine.status(), self._status
        self._status = status
        steps = status.draft_steps - last.draft_steps
        plain = status.plain_steps - last.plain_steps
        emitted = status.emitted - last.emitted
        staleness = [self.version - 1 - r.oldest_version for g in groups.values() for r in g]
        figures = {
            "seconds": seconds,
            "effective_tokens_per_second": rate.tokens_per_second,
            "effective_tokens_per_core_second": rate.tokens_per_core_second,
            "draft_version": float(status.draft_version),
            "staleness": sum(staleness) / len(staleness),
            "staleness_max": float(max(staleness)),
        }
        if steps > 0:
            figures["acceptance_length"] = emitted / steps
        if steps + plain > 0:
            figures["drafted_steps"] = steps / (steps + plain)
        figures |= {f"tokens/{fate}": float(count) for fate, count in span.fates.items()}
        for name, window in windows.items():
            figures |= _role_figures(name, window)
        if self._settings.balance:
            self._rebalance(Window(**windows))
            figures["concurrency"] = self._floor.concurrency
        return figures

    def _rebalance(self, window: Window) -> None:
        decision = self._balance.observe(window)
        if decision.changed:
            log.info("balance", change=decision.reason)
            self._floor.concurrency = decision.setting.concurrency
            self._learner.micro_batch_tokens = decision.setting.micro_batch_tokens

    def _adapt(self, tally: Tally, figures: dict[str, float]) -> None:
        alarm = self._length_watch.observe(tally.length, tally.accuracy)
        if alarm.changed:
            told = log.warning if alarm.on else log.info
            told("length alarm" if alarm.on else "the length alarm is over", reason=alarm.reason)
        figures["length_alarm"] = float(alarm.on)
        if self._settings.sampling.adapt_temperature:
            sample = UpdateSample(tally.entropy, tally.groups, tally.all_right, tally.all_wrong)
            decision = self._temperature.observe(sample)
            if decision.changed:
                log.info("sampling temperature", change=decision.reason)
                self._use_temperature()
        figures["temperature"] = self._floor.sampling.temperature

    def _use_temperature(self) -> None:
        self._floor.sampling = Sampling(temperature=self._temperature.temperature)

    async def _sample(
        self, token_ids: list[int], sampling: Sampling, most: int, priority: int
    ) -> Completion:
        return await self._engine.complete(token_ids, sampling, most, priority=priority)

    async def _evaluate_if_due(self) -> None:
        every = self._settings.evaluate_every
        if not every or self.version % every or self.version in self.evaluations:
            return
        settings = self._settings
        sampling = Sampling(temperature=settings.evaluate_temperature)

        async def complete(token_ids: list[int], most: int) -> Completion:
            return await self._sample(token_ids, sampling, most, EVALUATION_PRIORITY)

        result, _ = await evaluate(
            self._host,
            self._tokenizer,
            complete,
            self._limits,
            sampling,
            settings.evaluate_tasks,
            settings.evaluate_samples,
            settings.concurrency,
        )
        self.evaluations[self.version] = result
        self._sinks.metrics(self.version, result.metrics())
        self._progress.evaluated(self.version, result)

    def _shown(self, rollouts: list[Rollout]) -> list[dict[str, Any]]:
        step = max(1, len(rollouts) // SAMPLES_SHOWN)
        return [
            {
                "rollout": r.rollout_id,
                "task": r.task_id,
                "text": self._tokenizer.decode(r.token_ids),
                "reward": r.reward,
                "versions": [r.oldest_version, r.newest_version],
            }
            for r in rollouts[::step][:SAMPLES_SHOWN]
        ]

    # --- checkpoints ---

    @staticmethod
    def identity(settings: RLTrainSettings, base_id: str) -> dict[str, Any]:
        """What a resumed run must have in common with the one before."""
        return {
            "model": base_id,
            "environment": settings.environment.name,
            "environment options": settings.environment.options,
            "group size": settings.group_size,
            "seed": settings.seed,
        }

    def _checkpoint(self) -> None:
        """A disk that is full costs the checkpoint, not the run."""
        controllers = {
            "temperature": self._temperature.state(),
            "length": self._length_watch.state(),
            "balance": self._balance.state(),
        }
        try:
            saving.save(
                self._settings.out,
                self.identity(self._settings, self._base_id),
                self._learner.state(),
                self.books,
                self._floor.finished,
                controllers,
            )
        except OSError as error:
            log.error(
                "the checkpoint cannot be written; the one before stays", reason=error.strerror
            )

    def _restore(self, resumed: saving.Saved) -> None:
        self._learner.load_state(resumed.tensors, resumed.counters)
        saving.restore(self.books, resumed)
        self._floor.finished = dict(resumed.waiting)
        self._temperature.load_state(resumed.controllers["temperature"])
        self._length_watch.load_state(resumed.controllers["length"])
        self._balance.load_state(resumed.controllers["balance"])
        if self._settings.balance:
            self._floor.concurrency = self._balance.setting.concurrency
            self._learner.micro_batch_tokens = self._balance.setting.micro_batch_tokens


def _balance(settings: RLTrainSettings) -> Balance:
    """Cores stay where they are, for the engine's threads are fixed when it starts; and no micro-batch is
    larger than the one that was configured, which may be all that fits."""
    tokens = settings.optimiser.micro_batch_tokens
    start = Setting(settings.concurrency, 1, 1, tokens)
    least = Setting(min(settings.concurrency, settings.group_size), 1, 1, min(tokens, 1024))
    most = Setting(4 * settings.concurrency, 1, 1, tokens)
    return Balance(start, Bounds(least, most))


def _role_figures(name: str, window: RoleWindow) -> dict[str, float]:
    return {
        f"{name}/throughput": window.throughput,
        f"{name}/idle": 1 - window.busy,
        f"{name}/queue": window.queue,
    }


def _first(group: BaseExceptionGroup) -> BaseException:
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
