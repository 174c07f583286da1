"""The engine of a run: asked over any loss of it, and brought back with the version that was live."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from rlcore.generator.base import Completion, Generator, GeneratorError, GeneratorStatus, Published
from rlcore.generator.places import MODEL_NAME, InProcess, OwnServer, Place, RunningServer
from rlcore.records.trace import Sampling
from rlcore.rl.settings import RunSettings

ATTEMPTS = 4
"""Times that a request is sent, the engine being brought back in between."""

T = TypeVar("T")


@dataclass(frozen=True)
class Live:
    """The policy version that is to sample, and where its weights lie."""

    version: int
    folder: Path
    sha256: str


class Engine:
    def __init__(self, place: Place) -> None:
        self._place = place
        self._generator: Generator | None = None
        self._live: Live | None = None
        self._cores: int | None = None
        """That it was last told to compute on."""
        self._ready = asyncio.Event()
        self._bringing_back = asyncio.Lock()
        self._lost: GeneratorError | None = None
        """Why it could not be brought back: whoever asks is told."""
        self.restarts = 0
        self.longest = 0
        """Tokens of the longest sequence, once it has started."""

    async def start(self) -> None:
        """Raises GeneratorError."""
        self._generator = await self._place.start()
        self.longest = await self.generator.longest()
        self._ready.set()

    @property
    def generator(self) -> Generator:
        assert self._generator is not None, "start comes first"
        return self._generator

    async def complete(
        self,
        prompt_ids: list[int],
        sampling: Sampling,
        max_tokens: int,
        *,
        priority: int = 0,
        learn: bool = True,
    ) -> Completion:
        """A completion, over any loss of the engine; raises GeneratorError."""
        return await self._asking(
            lambda _: self.generator.complete(
                prompt_ids, sampling, max_tokens, priority=priority, learn=learn
            )
        )

    async def publish(self, live: Live) -> Published:
        """Make a version the one that samples; raises GeneratorError."""

        async def ask(attempt: int) -> Published:
            self._live = live
            if attempt and (await self.generator.status()).policy_version == live.version:
                return Published(live.version, 0.0, 0)  # the engine was brought back with it
            return await self.generator.publish(live.version, live.folder, live.sha256)

        return await self._asking(ask)

    async def compute_on(self, cores: int) -> None:
        """Have it compute on so many cores of this machine, from now on; raises GeneratorError."""
        await self._asking(lambda _: self.generator.compute_on(cores))
        self._cores = cores

    async def status(self) -> GeneratorStatus:
        """Over any loss of the engine; raises GeneratorError."""
        return await self._asking(lambda _: self.generator.status())

    async def close(self) -> None:
        await self._place.stop()

    async def _asking(self, ask: Callable[[int], Awaitable[T]]) -> T:
        """``ask`` with the number of the attempt, the engine being brought back in between."""
        for attempt in range(ATTEMPTS):
            await self._ready.wait()
            if self._lost is not None:
                raise self._lost
            seen = self.restarts
            try:
                return await ask(attempt)
            except GeneratorError as error:
                if not error.gone or attempt == ATTEMPTS - 1:
                    raise
                await self._bring_back(seen)
        raise AssertionError("unreachable")

    async def _bring_back(self, seen: int) -> None:
        """Start it again, or wait for it, with what was live and its cores. ``seen``: restarts known of.

        Nobody samples before the live version does: others wait for ``_ready``.
        """
        async with self._bringing_back:
            if self.restarts != seen:
                return  # another request has seen to it
            if not await self._place.lost():
                return
            if self._lost is not None:
                raise self._lost
            self._ready.clear()
            try:
                self._generator = await self._place.start_again()
                await self._publish_again()
                if self._cores is not None:
                    await self.generator.compute_on(self._cores)
            except GeneratorError as error:
                self._lost = error
                raise
            finally:
                self._ready.set()
            self.restarts += 1

    async def _publish_again(self) -> None:
        live = self._live
        if live is not None and (await self.generator.status()).policy_version != live.version:
            await self.generator.publish(live.version, live.folder, live.sha256)


def engine_of(
    settings: RunSettings, base: Path, out: Path, cores: int | None, lora_rank: int = 0
) -> Engine:
    """``base``: the folder of the policy that an engine of our own starts with, version 0.

    ``out``: where that keeps its drafts and its log. ``cores``: that such an engine starts with on a CPU;
    None for all that it would take by itself. ``lora_rank``: of the adapters that are published to it; 0 for
    whole policies.
    """
    options = settings.engine
    deadline = options.request_deadline_s
    if options.url is not None:
        key = None if options.api_key is None else options.api_key.get_secret_value()
        return Engine(RunningServer(options.url, deadline, key))
    flags = server_flags(settings, base, out, lora_rank, cores)
    if options.where == "process":
        return Engine(InProcess(flags, deadline))
    return Engine(OwnServer(flags, out / "server.log", {}, deadline))


def server_flags(
    settings: RunSettings, base: Path, out: Path, lora_rank: int = 0, cores: int | None = None
) -> list[str]:
    """Of ``paceline serve`` for an engine of this run's own."""
    options = settings.engine
    longest = options.max_model_len
    flags = [
        "--home", str(out / "server"),
        "--target", str(base),
        "--served-model-name", MODEL_NAME,
        "--dtype", options.dtype,
        "--draft", options.draft,
        "--draft-method", options.draft_method,
        "--speculative-tokens", str(options.speculative_tokens),
        "--speculation", options.speculation,
        "--learner", "local" if options.learns_drafts else "off",
        "--log-level", settings.log_level,
    ]  # fmt: skip
    if longest is not None:
        flags += ["--max-model-len", str(longest)]
    if cores is not None:
        flags += ["--cores", str(cores)]
    if lora_rank:
        flags += ["--policy-lora-rank", str(lora_rank)]
    # Log-probabilities of the distribution that was sampled from, whatever the temperature.
    own = ["--logprobs-mode", "processed_logprobs", "--scheduling-policy", "priority"]
    return [*flags, *options.serve_flags, "--", *own, *options.engine_args]
