"""The engine of a run: a server of its own or one that runs already, brought back when it is lost."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from rlcore.generator.base import Completion, GeneratorError, GeneratorStatus, Published
from rlcore.generator.process import ChildServer
from rlcore.generator.server import ServerGenerator
from rlcore.log import get_logger
from rlcore.records import Sampling
from rlcore.rl.settings import RLTrainSettings

log = get_logger("rl")

ATTEMPTS = 4
"""Times that a request is sent, the engine being brought back in between."""

BACK_DEADLINE = 300.0
"""Seconds that a server which is not ours is given to come back."""

MODEL_NAME = "policy"

T = TypeVar("T")


@dataclass(frozen=True)
class Live:
    """The policy version that is to sample, and where its weights lie."""

    version: int
    folder: Path
    sha256: str


class Engine:
    def __init__(self, settings: RLTrainSettings, base: Path, threads: int | None) -> None:
        """``base``: the folder of the policy that a server of our own starts with, version 0.

        ``threads``: of the server on a CPU; None for all that it would take by itself.
        """
        options = settings.engine
        self._server: ChildServer | None = None
        self._url = options.url
        self._deadline_s = options.request_deadline_s
        self._key = None if options.api_key is None else options.api_key.get_secret_value()
        if options.url is None:
            self._server = ChildServer(
                server_flags(settings, base),
                settings.out / "server.log",
                {} if threads is None else {"OMP_NUM_THREADS": str(threads)},
            )
        self._generator: ServerGenerator | None = None
        self._live: Live | None = None
        self._ready = asyncio.Event()
        self._bringing_back = asyncio.Lock()
        self._lost: GeneratorError | None = None
        """Why it could not be brought back: whoever asks is told."""
        self.restarts = 0
        self.longest = 0
        """Tokens of the longest sequence, once it has started."""

    async def start(self) -> None:
        """Raises GeneratorError."""
        await self._start_server()
        self.longest = await self.generator.longest()
        self._ready.set()

    async def _start_server(self) -> None:
        if self._server is not None:
            log.info("the server starts", log=str(self._server.log_file))
            await self._server.start()
            self._url = self._server.url
        assert self._url is not None
        self._generator = ServerGenerator(self._url, MODEL_NAME, self._deadline_s, self._key)

    @property
    def generator(self) -> ServerGenerator:
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

    async def status(self) -> GeneratorStatus:
        """Over any loss of the engine; raises GeneratorError."""
        return await self._asking(lambda _: self.generator.status())

    async def close(self) -> None:
        if self._generator is not None:
            await self._generator.close()
        if self._server is not None:
            await self._server.stop()

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
        """Start it again, or wait for it, and publish what was live. ``seen``: restarts known of.

        Nobody samples before the live version does: others wait for ``_ready``.
        """
        async with self._bringing_back:
            if self.restarts != seen:
                return  # another request has seen to it
            if self._server is not None and self._server.alive and await self.generator.healthy():
                return  # a connection was lost, not the server
            if self._lost is not None:
                raise self._lost
            self._ready.clear()
            try:
                await self._start_again()
            except GeneratorError as error:
                self._lost = error
                raise
            finally:
                self._ready.set()
            self.restarts += 1

    async def _start_again(self) -> None:
        if self._server is not None:
            log.warning("the server is gone and is started again")
            await self.generator.close()
            await self._server.stop()
            await self._start_server()
        else:
            log.warning("the server does not answer; waiting for it", url=self._url)
            await self._wait_for_it()
        if self._live is not None:
            live = self._live
            if (await self.generator.status()).policy_version != live.version:
                await self.generator.publish(live.version, live.folder, live.sha256)

    async def _wait_for_it(self) -> None:
        try:
            async with asyncio.timeout(BACK_DEADLINE):
                while True:
                    try:
                        await self.generator.status()
                        return
                    except GeneratorError:
                        await asyncio.sleep(1.0)
        except TimeoutError:
            raise GeneratorError(
                f"{self._url} did not come back within {BACK_DEADLINE:.0f} s; start it and use --resume"
            ) from None


def server_flags(settings: RLTrainSettings, base: Path) -> list[str]:
    """Of ``paceline serve`` for this run's own server."""
    options = settings.engine
    longest = options.max_model_len
    flags = [
        "--home", str(settings.out / "server"),
        "--target", str(base),
        "--served-model-name", MODEL_NAME,
        "--dtype", options.dtype,
        "--draft", options.draft,
        "--draft-method", options.draft_method,
        "--speculative-tokens", str(options.speculative_tokens),
        "--speculation", options.speculation,
        "--learner", "local" if options.learn_drafts else "off",
        "--log-level", settings.log_level,
    ]  # fmt: skip
    if longest is not None:
        flags += ["--max-model-len", str(longest)]
    # Log-probabilities of the distribution that was sampled from, whatever the temperature.
    own = ["--logprobs-mode", "processed_logprobs", "--scheduling-policy", "priority"]
    return [*flags, *options.serve_flags, "--", *own, *options.engine_args]
