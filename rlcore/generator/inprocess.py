"""An engine of this process as the generator: no server, no HTTP, a drafter that stays as it is.

The engine is the one that ``paceline serve`` starts, with the same flags; its core is a child process.
What a learner of drafts needs beside it (the link that tells it of the target, judges its versions and
makes them live) is the server's, so here the drafter is frozen.
"""

from __future__ import annotations

import asyncio
import itertools
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from rlcore.errors import PacelineError
from rlcore.first_draft import first_draft
from rlcore.generator.base import Completion, GeneratorError, GeneratorStatus, Published
from rlcore.home import Home
from rlcore.live_drafts import expected_rates, read_live
from rlcore.log import get_logger
from rlcore.records.acceptance import AcceptanceCount
from rlcore.records.trace import Sampling
from rlcore.settings import ServeSettings, load
from rlcore.target import local_model, model_identity
from rlcore.weights import WeightError

if TYPE_CHECKING:
    from rlcore.engine.frontend import PacelineLLM

log = get_logger("rl")

FIRST_VERSION = 0
"""Of the policy that the engine starts with."""

RPC_DEADLINE = 60.0
"""Seconds for what is no completion and no version: the engine answers between two steps."""

LOOK_INTERVAL = 0.5
"""Seconds between two looks at whether the engine lives."""


class InProcessGenerator:
    """``start`` once, ``close`` in the end."""

    def __init__(self, flags: Sequence[str], model_name: str, deadline_s: float) -> None:
        """``flags``: of ``paceline serve``. ``deadline_s``: for one completion, its time in the queue
        included."""
        self._flags = list(flags)
        self._model_name = model_name
        self._deadline_s = deadline_s
        self._names = itertools.count()
        self._publishing = asyncio.Lock()
        self._llm: PacelineLLM | None = None
        self._watching: asyncio.Task[None] | None = None
        self._target_id = ""
        self._draft_version = -1
        self._policy_version = FIRST_VERSION

    async def start(self) -> None:
        """Raises GeneratorError."""
        try:
            self._llm = await asyncio.to_thread(self._engine)
        except PacelineError as error:
            raise GeneratorError(str(error)) from None
        except Exception as error:  # whatever vLLM raises when its engine does not come up
            reason = " ".join(str(error).split())
            raise GeneratorError(
                f"the engine did not start: {reason} (its own words are above)"
            ) from None
        self._watching = asyncio.create_task(self._watch(self._llm))
        try:
            async with asyncio.timeout(RPC_DEADLINE):
                await self._llm.update_weight_version(str(FIRST_VERSION))
        except TimeoutError as error:
            raise self._lost(error) from None

    async def _watch(self, llm: PacelineLLM) -> None:
        """Whoever waits for an answer of an engine that has died is told so, for as long as it is held."""
        while True:
            if llm.errored:
                llm.fail_calls()
            await asyncio.sleep(LOOK_INTERVAL)

    def _engine(self) -> PacelineLLM:
        from rlcore.engine.launch import engine_arguments, prepare_environment, start_engine
        from rlcore.engine.options import EngineOptions

        settings = load(ServeSettings, self._flags)
        with _for_children():
            prepare_environment(settings)
            home = Home(settings.home)
            target = local_model(settings.target, home)
            self._target_id = model_identity(target)
            store = first_draft(settings, home, target, self._target_id)
            live = read_live(store.root)
            assert live is not None, "first_draft has written it"
            self._draft_version = live.live
            options = EngineOptions(
                target_version=FIRST_VERSION,
                draft_version=live.live,
                draft_rates=expected_rates(store.manifest(live.live)),
                speculation=settings.speculation,
                link_endpoint=f"ipc://{home.run}/engine",
                trace_endpoint=None,
                capture_rate=0.0,
                capture_span_tokens=settings.capture_span_tokens,
                capture_queue=settings.capture_queue,
                policy_rank=settings.policy_lora_rank,
            )
            draft = store.folder(live.live)
            args = engine_arguments(settings, target, self._model_name, draft, options)
            args.disable_log_stats = True
            llm = start_engine(args)
        llm.on_end = lambda request_id, tokens, ticket: None  # nobody learns from the traces
        return llm

    @property
    def llm(self) -> PacelineLLM:
        assert self._llm is not None, "start comes first"
        return self._llm

    async def complete(
        self,
        prompt_ids: Sequence[int],
        sampling: Sampling,
        max_tokens: int,
        *,
        priority: int = 0,
        tenant: str = "default",
        learn: bool = True,
    ) -> Completion:
        from rlcore.engine.completion import EngineLost, RequestRefused, sample

        name = f"rollout-{next(self._names)}"
        try:
            async with asyncio.timeout(self._deadline_s):
                done = await sample(self.llm, name, prompt_ids, sampling, max_tokens, priority)
        except TimeoutError:
            raise GeneratorError(
                f"the engine did not complete a request within {self._deadline_s:.0f} s"
            ) from None
        except EngineLost as error:
            raise GeneratorError(str(error), gone=True) from None
        except RequestRefused as error:
            raise GeneratorError(str(error)) from None
        return Completion(
            token_ids=done.token_ids,
            logprobs=done.logprobs,
            policy_versions=done.policy_versions,
            finish_reason=done.finish_reason,
            draft_version=self._draft_version,
        )

    async def publish(self, version: int, folder: Path, sha256: str) -> Published:
        from rlcore.engine.policy_swap import swap_policy

        async with self._publishing:
            if version <= self._policy_version:
                raise GeneratorError(
                    f"policy version {version} was refused: version {self._policy_version} is live; "
                    "count on from there"
                )
            try:
                report = await swap_policy(self.llm, str(folder), sha256, version)
            except WeightError as error:
                raise GeneratorError(f"policy version {version} was refused: {error}") from None
            except Exception as error:  # whatever vLLM raises when its engine is gone
                raise self._lost(error) from None
            self._policy_version = version
        return Published(version, report.stall_seconds, report.frozen_tokens)

    async def status(self) -> GeneratorStatus:
        try:
            async with asyncio.timeout(RPC_DEADLINE):  # vLLM's own is not kept by its client
                (counts, *_) = await self.llm.collective_rpc("paceline_acceptance")
        except Exception as error:  # whatever vLLM raises when its engine is gone
            raise self._lost(error) from None
        acceptance = [AcceptanceCount(**count) for count in counts]
        return GeneratorStatus(
            policy_version=self._policy_version,
            draft_version=self._draft_version,
            target_id=self._target_id,
            emitted=sum(count.emitted for count in acceptance),
            draft_steps=sum(count.steps for count in acceptance),
            plain_steps=sum(count.plain_steps for count in acceptance),
        )

    async def compute_on(self, cores: int) -> None:
        try:
            async with asyncio.timeout(RPC_DEADLINE):
                (threads, *_) = await self.llm.collective_rpc("paceline_compute_on", args=(cores,))
        except Exception as error:  # whatever vLLM raises when its engine is gone
            raise self._lost(error) from None
        if not threads:
            raise GeneratorError("the engine's threads are not ours to set here")

    async def longest(self) -> int:
        return int(self.llm.model_config.max_model_len)

    async def healthy(self) -> bool:
        return self._llm is not None and not self._llm.errored

    async def close(self) -> None:
        if self._llm is not None:
            llm, self._llm = self._llm, None
            if self._watching is not None:
                self._watching.cancel()
            llm.fail_calls()  # nobody is left who could answer them
            await asyncio.to_thread(llm.shutdown)

    def _lost(self, error: Exception) -> GeneratorError:
        if isinstance(error, TimeoutError):
            return GeneratorError(
                f"the engine did not answer within {RPC_DEADLINE:.0f} s", gone=True
            )
        return GeneratorError(f"the engine could not be asked: {error}", gone=True)


KEPT = "VLLM_"
"""Prefix of the variables that vLLM goes on reading here."""


@contextmanager
def _for_children() -> Iterator[None]:
    """What the engine's processes find in the environment, and other children do not."""
    before = dict(os.environ)
    try:
        yield
    finally:
        for name in {*os.environ} - {*before}:
            if not name.startswith(KEPT):
                del os.environ[name]
        os.environ.update(
            {name: value for name, value in before.items() if not name.startswith(KEPT)}
        )
