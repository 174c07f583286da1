"""A run of policy RL: rollouts flow to the trainer, better policies flow back, until it is done."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from torch import Tensor

from rlcore.asynchrony.admission import Admission
from rlcore.asynchrony.role_windows import RoleMeter
from rlcore.asynchrony.task_chances import TaskChances
from rlcore.asynchrony.task_order import TaskOrder
from rlcore.asynchrony.token_ledger import Fate, TokenLedger
from rlcore.environments.host import EnvironmentHost
from rlcore.errors import PacelineError
from rlcore.generator.base import Completion
from rlcore.log import get_logger
from rlcore.records.trace import Sampling
from rlcore.records.versions import PolicyManifest
from rlcore.rl import saved as saving
from rlcore.rl.engine import Engine, Live
from rlcore.rl.episode import Limits
from rlcore.rl.evaluate import evaluate
from rlcore.rl.learn import BatchReport, PolicyLearner
from rlcore.rl.progress import Progress
from rlcore.rl.report import Speedometer, samples, staleness
from rlcore.rl.rollouts import Books, Roles, RolloutFloor
from rlcore.rl.settings import RLTrainSettings
from rlcore.rl.sinks import Sinks
from rlcore.rl.steering import Steering
from rlcore.rl.tally import Tally
from rlcore.rl.threads import CoreSplit
from rlcore.rollout import Rollout
from rlcore.weights import PolicyStore

log = get_logger("rl")

STALL_WARNING = 120.0
"""Seconds without any change after which the log says what is waited for."""

STALL_DEADLINE = 1800.0
"""Seconds without any change that end the run: something hangs."""

FRUITLESS = 100
"""Times as many groups as an update needs that may end without making one."""

SUSPICIOUS_MISMATCH = 0.05
"""``mismatch_kl_on_policy`` above which the log says so: float32 is below 1e-3, and bfloat16 served beside
a float32 trainer at some hundredths."""

KEPT_POLICIES = 2
"""Published versions whose weights stay on disk: the live one and the one before."""

EVALUATION_PRIORITY = -(2**30)
"""Before every rollout."""

T = TypeVar("T")


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
        split: CoreSplit,
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
            engine.longest,
        )
        self.books = Books(
            Admission(
                settings.max_off_policy_steps,
                settings.groups_per_update,
                updates_per_batch=settings.optimiser.updates_per_batch,
            ),
            TaskOrder(settings.seed, host.size("train")),
            TokenLedger(),
            TaskChances(settings.seed, settings.group_size) if settings.weigh_tasks else None,
        )
        now = time.monotonic()
        self._roles = Roles(
            RoleMeter(now), RoleMeter(now, settings.environment.workers), RoleMeter(now)
        )
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
        self._steering = Steering(settings, self._floor, learner, split, engine.compute_on)
        if resumed is not None:
            learner.load_state(resumed.tensors, resumed.counters)
            saving.restore(self.books, resumed)
            self._floor.finished = dict(resumed.waiting)
            self._steering.load_state(resumed.controllers)
        self._store = PolicyStore(settings.out / "policies", adapters=learner.lora is not None)
        self._sinks = Sinks(settings.out, None if resumed is None else resumed.update)
        self._progress = Progress(settings.updates)
        self._speed = Speedometer(self._roles, self.books.ledger)
        self._started = now
        # One thread for all that computes at length: its memory is used again and again.
        self._thread = ThreadPoolExecutor(1, "trainer")
        self._writer = ThreadPoolExecutor(1, "publisher")
        self._publishing: asyncio.Task[None] | None = None
        self._published: dict[str, float] = {}
        """What the last publication cost, in seconds."""

    @property
    def version(self) -> int:
        """Of the policy in the trainer: optimizer updates taken."""
        return self.books.admission.version

    async def run(self) -> None:
        """Until all updates are done, or the time is up. Raises PacelineError."""
        try:
            with self._progress:
                if self.version:
                    await self._begin_to_publish()
                    await self._until_published()
                status = await self._engine.status()
                if status.target_id != self._base_id:
                    raise RunError(
                        f"the server serves {status.target_id}, the run trains {self._base_id}; start it "
                        "with the run's --model as its --target"
                    )
                if status.policy_version != self.version:
                    raise RunError(
                        f"the server has policy version {status.policy_version} live, the run is at "
                        f"{self.version}; start the server again"
                    )
                await self._steering.begin()
                if not self.version and self._settings.evaluate_every:
                    await self._evaluate()
                self._speed.begin(await self._engine.status())
                await self._until_done()
        finally:
            self._sinks.close()
            self._thread.shutdown(cancel_futures=True)
            self._writer.shutdown(cancel_futures=True)

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
            tasks = [floor, trainer, *([self._publishing] if self._publishing else [])]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _train(self) -> None:
        while self.version < self._settings.updates and not self._time_is_up():
            batch = await self._next_batch()
            groups = {name: self._floor.finished.pop(name) for name in batch}
            since = self.version
            report = await self._update(list(groups.values()))
            self._settle(groups, report)
            if not report.taken:
                log.warning("a batch led to no update", reasons=[u.skipped for u in report.updates])
                self._floor.wake()
                continue
            await self._begin_to_publish()
            await self._after_update(groups, report, since)
        await self._until_published()
        await self._checkpoint()

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
            self._check_fruit()
            if self._publishing is not None and self._publishing.done():
                await self._until_published()  # what it raises ends the run
            if await self._floor.changed(STALL_WARNING):
                quiet = time.monotonic()
                continue
            waited = time.monotonic() - quiet
            admission = self.books.admission
            state = {
                "running_groups": len(admission.running),
                "waiting_groups": len(admission.waiting),
                "needed": self._settings.groups_per_update,
                "waits_for_groups": admission.blocking(),
            }
            log.warning("no rollout ended for a while", seconds=round(waited), **state)
            if waited > STALL_DEADLINE:
                raise RunError(f"no rollout ended for {waited:.0f} s ({state}); see server.log")

    def _check_fruit(self) -> None:
        """Rollouts that never differ would go on for ever."""
        tally = self._floor.tally
        tried = tally.groups + tally.given_up
        if tried > FRUITLESS * self._settings.groups_per_update:
            raise RunError(
                f"of the last {tried} groups {tally.equal} had equal rewards and {tally.given_up} came to "
                f"nothing ({dict(tally.failed)}); there is nothing to learn from. Take easier or harder "
                "tasks, a larger group-size or a higher temperature"
            )

    async def _update(self, groups: list[list[Rollout]]) -> BatchReport:
        meter = self._roles.trainer
        meter.working(1, time.monotonic())
        try:
            report = await self._in_thread(self._learner.train, groups, self.version)
        finally:
            meter.working(0, time.monotonic())
        meter.done(sum(report.tokens), time.monotonic())
        meter.queued(len(self._floor.finished), time.monotonic())
        return report

    def _settle(self, groups: dict[str, list[Rollout]], report: BatchReport) -> None:
        books = self.books
        before = zip(groups, report.before, strict=True)
        books.admission.trained({name: n for name, n in before if n is not None}, report.taken)
        for name in groups:
            books.order.trained(int(name))
        names = [rollout.rollout_id for group in groups.values() for rollout in group]
        books.ledger.settled_together(names, report.fates())

    async def _begin_to_publish(self) -> None:
        """The policy is copied and goes live while the next update is under way."""
        await self._until_published()
        self._publishing = asyncio.create_task(
            self._publish(self.version, [await self._in_thread(self._learner.snapshot)])
        )
        self._publishing.add_done_callback(lambda _: self._floor.wake())

    async def _until_published(self) -> None:
        """Raises what publishing raised."""
        if self._publishing is not None:
            task, self._publishing = self._publishing, None
            await task

    async def _publish(self, version: int, copies: list[dict[str, Tensor]]) -> None:
        """``copies``: the one of its weights; it is taken out, to be freed once it is written."""
        started = time.monotonic()
        loop = asyncio.get_running_loop()
        before = self.books.admission.published_version
        parent = before if before < version else None  # on resume it is published again
        manifest = PolicyManifest(
            version,
            parent,
            "",
            self._base_id,
            tokens_seen=self.books.ledger.totals().fates[Fate.TRAINED],
            lora_rank=self._settings.lora.rank,
        )
        manifest = await loop.run_in_executor(self._writer, self._write, manifest, copies)
        live = Live(version, self._store.folder(version), manifest.sha256)
        published = await self._engine.publish(live)
        self.books.ledger.reprefilled(published.reprefilled)
        self.books.admission.published(version)
        versions = self._store.versions()
        kept = [other for other in versions if other <= version][-KEPT_POLICIES:]
        for other in versions:
            if other not in kept:  # later ones: before a resume
                self._store.remove(other)
        seconds = time.monotonic() - started
        self._published = {"publish_seconds": seconds, "stall_seconds": published.stall_s}

    def _write(self, manifest: PolicyManifest, copies: list[dict[str, Tensor]]) -> PolicyManifest:
        if manifest.version in self._store.versions():
            self._store.remove(manifest.version)
        return self._store.publish(copies.pop(), self._learner.config(), manifest)

    async def _after_update(
        self, groups: dict[str, list[Rollout]], report: BatchReport, since: int
    ) -> None:
        """``since``: the version that the batch began with."""
        version, tally = self.version, self._floor.tally
        trained_as = report.metrics()
        apart = trained_as.get("mismatch_kl_on_policy", 0.0)
        if apart > SUSPICIOUS_MISMATCH:
            log.warning(
                "trainer and engine disagree on the policy", mismatch_kl_on_policy=round(apart, 4)
            )
        self._floor.tally = Tally()
        rollouts = [rollout for group in groups.values() for rollout in group]
        before = zip(groups.values(), report.before, strict=True)
        trained = [(group, since + n) for group, n in before if n is not None]
        status, now = await self._engine.status(), time.monotonic()
        window = self._speed.window(now)
        figures = {
            **tally.metrics(),
            **trained_as,
            **self._speed.figures(window, status, now),
            **staleness(trained),
            **self._published,
            **await self._steering.observe(tally, window),
            "engine_restarts": float(self._engine.restarts),
        }
        self._sinks.metrics(version, figures)
        self._sinks.trained(version, {name: group[0].task_id for name, group in groups.items()})
        self._sinks.samples(version, samples(rollouts, self._tokenizer))
        self._progress.update(version, figures)
        if self._due(self._settings.evaluate_every, since):
            await self._evaluate()
        if self._due(self._settings.checkpoint_every, since):
            await self._checkpoint()

    def _due(self, every: int, since: int) -> bool:
        """Whether a multiple of ``every`` has been reached; a batch may be good for several updates."""
        return every > 0 and self.version // every > since // every

    async def _sample(
        self, token_ids: list[int], sampling: Sampling, most: int, priority: int
    ) -> Completion:
        return await self._engine.complete(token_ids, sampling, most, priority=priority)

    async def _evaluate(self) -> None:
        await self._until_published()
        settings = self._settings
        sampling = Sampling(temperature=settings.evaluate_temperature)

        async def complete(token_ids: list[int], most: int) -> Completion:
            return await self._engine.complete(
                token_ids, sampling, most, priority=EVALUATION_PRIORITY, learn=False
            )

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
        self._sinks.metrics(self.version, result.metrics())
        self._progress.evaluated(self.version, result)

    @staticmethod
    def identity(settings: RLTrainSettings, base_id: str) -> dict[str, Any]:
        """What a resumed run must have in common with the one before."""
        return {
            "model": base_id,
            "environment": settings.environment.name,
            "environment options": settings.environment.options,
            "group size": settings.group_size,
            "seed": settings.seed,
            "lora": settings.lora.model_dump() if settings.lora.rank else None,
        }

    async def _checkpoint(self) -> None:
        """A disk that is full costs the checkpoint, not the run."""
        facts = saving.facts_of(
            self.identity(self._settings, self._base_id),
            self.books,
            self._floor.finished,
            self._steering.state(),
        )

        def write() -> None:
            saving.save(self._settings.out, facts, self._learner.state())

        try:
            await self._in_thread(write)
        except OSError as error:
            log.error(
                "the checkpoint cannot be written; the one before stays", reason=error.strerror
            )

    async def _in_thread(self, work: Callable[..., T], *arguments: Any) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work, *arguments)


def _first(group: BaseExceptionGroup) -> BaseException:
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
