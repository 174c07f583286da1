"""Keeps one engine running: starts it, watches it, starts it again when it dies.

Whatever is served afterwards is what was live before: the draft version, and the policy that was published
last (its checkpoint is loaded once more; where that is gone, the server's own target serves, and says so).
"""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import threading
import time
from argparse import Namespace
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, TypeVar

from rlcore.errors import PacelineError
from rlcore.log import get_logger
from server.deaths import WINDOW, Deaths
from server.front import START_DEADLINE, Front

if TYPE_CHECKING:
    from rlcore.engine.frontend import PacelineLLM

log = get_logger("server")

T = TypeVar("T")

WATCH_INTERVAL = 0.1
"""Seconds between two looks at whether the engine is alive."""

STOP_DEADLINE = 10.0
"""Seconds an engine is given to end before its processes are killed."""

START_STOP_DEADLINE = 30.0
"""Seconds that an engine which is just starting has to fail, its processes being killed."""


class ServeError(PacelineError):
    """The engine did not start, or ended by itself for good."""


class EngineKeeper:
    """``arguments``: vLLM's, for what is live now; ``install``: puts a started engine to use."""

    def __init__(
        self,
        front: Front,
        arguments: Callable[[], Awaitable[Namespace]],
        start: Callable[[Namespace], PacelineLLM],
        install: Callable[[PacelineLLM], Awaitable[None]],
        remove: Callable[[], None],
    ) -> None:
        self.llm: PacelineLLM | None = None
        self.restarts = 0
        self._front = front
        self._arguments = arguments
        self._start_engine = start
        self._install = install
        self._remove = remove
        self._starting: asyncio.Future[PacelineLLM] | None = None
        front.engine_died = lambda: self.llm is None or self.llm.errored

    async def run(self) -> None:
        """Keep an engine running for ever; raises ServeError when there is none and will be none."""
        deaths = Deaths()
        await self._start()
        while True:
            await self._until_dead()
            if self._front.state == "draining":
                return
            self._front.change("restarting")
            self._remove()
            await self._restart(deaths)

    async def _restart(self, deaths: Deaths) -> None:
        """Again and again, until it is up; raises ServeError."""
        while True:
            delay = deaths.observe(time.monotonic())
            if delay is None:
                raise ServeError(
                    f"the engine died {deaths.recent} times within {WINDOW / 60:.0f} minutes and is not "
                    "started again; its own words are above"
                )
            log.error("the engine died and is started again", deaths=deaths.recent, in_s=delay)
            await self._discard()
            await asyncio.sleep(delay)
            self.restarts += 1
            try:
                await self._start()
                return
            except ServeError as error:
                self._remove()  # it may have died with half of it put to use
                log.error("the engine did not come back", reason=str(error))

    async def _start(self) -> None:
        began = time.monotonic()
        try:
            arguments = await self._arguments()
            self._starting = _in_thread(lambda: self._start_engine(arguments))
            async with asyncio.timeout(START_DEADLINE) as whole:
                self.llm = await asyncio.shield(self._starting)
                await self._put_to_use(self.llm)
        except PacelineError:
            raise
        except Exception as error:
            if isinstance(error, TimeoutError) and whole.expired():
                kill_engine_processes()
                raise ServeError(
                    f"the engine did not start within {START_DEADLINE:.0f} s"
                ) from None
            reason = " ".join(str(error).split()) or type(error).__name__
            raise ServeError(
                f"the engine did not start: {reason} (its own words are above)"
            ) from None
        self._front.change("ready")
        log.info("the engine is up", seconds=round(time.monotonic() - began, 1))

    async def _put_to_use(self, llm: PacelineLLM) -> None:
        """Raises ServeError when it dies meanwhile: what is asked of it then is never answered."""
        installed = asyncio.ensure_future(self._install(llm))
        try:
            while not installed.done():
                await asyncio.wait({installed}, timeout=WATCH_INTERVAL)
                if llm.errored:
                    raise ServeError("the engine died before it was ready; its own words are above")
            installed.result()
        finally:
            installed.cancel()

    async def _until_dead(self) -> None:
        assert self.llm is not None
        while not self.llm.errored:
            await asyncio.sleep(WATCH_INTERVAL)

    async def _discard(self) -> None:
        """Of a dead engine nothing stays, its other processes neither."""
        llm, self.llm = self.llm, None
        if llm is not None:
            llm.fail_calls()
            await asyncio.to_thread(llm.shutdown)
        kill_engine_processes()

    async def stop(self) -> None:
        """End the engine, also one that is just starting."""
        deadline = time.monotonic() + START_STOP_DEADLINE
        while self._starting is not None and not self._starting.done():
            kill_engine_processes()  # the start fails for it
            if time.monotonic() > deadline:
                log.warning("the engine's start could not be ended in time")
                break
            await asyncio.wait({self._starting}, timeout=0.2)
        start = self._starting
        if self.llm is None and start is not None and start.done() and not start.exception():
            self.llm = start.result()  # it came up nevertheless
        if self.llm is not None:
            try:
                async with asyncio.timeout(STOP_DEADLINE):
                    await asyncio.to_thread(self.llm.shutdown)
            except TimeoutError:
                log.warning("the engine did not end in time and is killed")
        kill_engine_processes()


def _in_thread(work: Callable[[], T]) -> asyncio.Future[T]:
    """Its result, of a thread that does not hold up the end of the process when it never comes."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def settle(settle_it: Callable[[Any], None], value: Any) -> None:
        if not future.done():
            settle_it(value)

    def run() -> None:
        settle_it: Callable[[Any], None]
        value: Any
        try:
            settle_it, value = future.set_result, work()
        except BaseException as error:  # whatever it is belongs to whoever waits
            settle_it, value = future.set_exception, error
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
            loop.call_soon_threadsafe(settle, settle_it, value)

    threading.Thread(target=run, name="paceline-engine-start", daemon=True).start()
    return future


def kill_engine_processes() -> None:
    """At once. vLLM starts them through multiprocessing, and nothing else here does."""
    for process in multiprocessing.active_children():
        process.kill()
