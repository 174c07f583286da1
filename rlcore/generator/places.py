"""Where the engine of a run is: a server of its own, one that runs already, or this very process."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

from rlcore.generator.base import Generator, GeneratorError
from rlcore.generator.inprocess import InProcessGenerator
from rlcore.generator.process import ChildServer
from rlcore.generator.server import ServerGenerator
from rlcore.log import get_logger

log = get_logger("rl")

BACK_DEADLINE = 300.0
"""Seconds that a server which is not ours is given to come back."""

MODEL_NAME = "policy"


class Place(Protocol):
    """One generator at a time comes from it. Raises GeneratorError."""

    async def start(self) -> Generator: ...

    async def lost(self) -> bool:
        """Whether the engine that was started is gone, after a request has failed."""
        ...

    async def start_again(self) -> Generator:
        """After it was lost: with the weights that it first had."""
        ...

    async def stop(self) -> None: ...


class OwnServer:
    """A child process."""

    def __init__(
        self, flags: Sequence[str], log_file: Path, env: Mapping[str, str], deadline_s: float
    ) -> None:
        self._server = ChildServer(flags, log_file, env)
        self._deadline_s = deadline_s
        self._generator: ServerGenerator | None = None

    async def start(self) -> Generator:
        log.info("the server starts", log=str(self._server.log_file))
        await self._server.start()
        self._generator = ServerGenerator(self._server.url, MODEL_NAME, self._deadline_s)
        return self._generator

    async def lost(self) -> bool:
        if self._generator is None or not self._server.alive:
            return True
        return not await self._generator.healthy()  # or else a connection was lost

    async def start_again(self) -> Generator:
        log.warning("the server is gone and is started again")
        await self.stop()
        return await self.start()

    async def stop(self) -> None:
        if self._generator is not None:
            await self._generator.close()
        await self._server.stop()


class RunningServer:
    """Somebody else's, by its URL."""

    def __init__(self, url: str, deadline_s: float, api_key: str | None) -> None:
        self._url = url
        self._generator = ServerGenerator(url, MODEL_NAME, deadline_s, api_key)

    async def start(self) -> Generator:
        return self._generator

    async def lost(self) -> bool:
        return True  # it may have come back already, with other weights

    async def start_again(self) -> Generator:
        log.warning("the server does not answer; waiting for it", url=self._url)
        try:
            async with asyncio.timeout(BACK_DEADLINE):
                while not await self._answers():
                    await asyncio.sleep(1.0)
        except TimeoutError:
            raise GeneratorError(
                f"{self._url} did not come back within {BACK_DEADLINE:.0f} s; start it and use --resume"
            ) from None
        return self._generator

    async def _answers(self) -> bool:
        try:
            await self._generator.status()
        except GeneratorError:
            return False
        return True

    async def stop(self) -> None:
        await self._generator.close()


class InProcess:
    """An engine whose front side is in this process."""

    def __init__(self, flags: Sequence[str], deadline_s: float) -> None:
        self._flags = list(flags)
        self._deadline_s = deadline_s
        self._generator: InProcessGenerator | None = None

    async def start(self) -> Generator:
        log.info("the engine starts in this process")
        self._generator = InProcessGenerator(self._flags, MODEL_NAME, self._deadline_s)
        await self._generator.start()
        return self._generator

    async def lost(self) -> bool:
        return self._generator is None or not await self._generator.healthy()

    async def start_again(self) -> Generator:
        log.warning("the engine is gone and is started again")
        await self.stop()
        return await self.start()

    async def stop(self) -> None:
        if self._generator is not None:
            await self._generator.close()
