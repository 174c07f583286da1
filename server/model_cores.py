"""On how many of the machine's cores the model computes, changed while it runs."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from rlcore.errors import PacelineError
from rlcore.log import get_logger

log = get_logger("server")

Set = Callable[[int], Awaitable[int]]
"""Tells the engine, which answers with its threads; raises whatever vLLM raises when that is gone."""


class CoresError(PacelineError):
    """The model's cores stay as they are."""


class EngineAway(CoresError):
    """There is no engine to tell."""


class ModelCores:
    """What the model is allotted; an engine that is started again is told anew."""

    def __init__(self, usable: int, allotted: int) -> None:
        """``usable``: 0 where the engine's threads are not ours to set."""
        self.usable = usable
        self.allotted = allotted
        self._first = allotted
        self._lock = asyncio.Lock()
        self._set: Set | None = None

    @property
    def all(self) -> bool:
        """Whether the model may have every core."""
        return self.allotted == self.usable

    async def connect(self, tell: Set) -> None:
        """Give it an engine, which computes on as many cores as the first one began with."""
        if self.allotted != self._first:
            await tell(self.allotted)
        self._set = tell

    def disconnect(self) -> None:
        """The engine has died."""
        self._set = None

    async def allot(self, cores: int) -> int:
        """The threads that the model then has. Raises CoresError."""
        if not self.usable:
            raise CoresError(
                "the model's threads cannot be changed here: it is on a GPU, or they are bound, or "
                "OMP_NUM_THREADS has set them (--cores does that too, and can be changed)"
            )
        if not 1 <= cores <= self.usable:
            raise CoresError(f"the model may compute on 1 to {self.usable} cores, not on {cores}")
        async with self._lock:
            if self._set is None:
                raise EngineAway("the engine is not up yet")
            try:
                threads = await self._set(cores)
            except Exception as error:  # whatever vLLM raises when its engine is gone
                raise EngineAway(f"the engine could not be asked: {error}") from error
            self.allotted = cores
        log.info("the model is allotted cores", cores=cores, of=self.usable)
        return threads
