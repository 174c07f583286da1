"""SIGTERM and SIGINT: the first one asks for a drain, the second one for an end at once."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import Iterator

from rlcore.log import get_logger
from server.front import Front
from server.keeper import EngineKeeper, kill_engine_processes
from server.learner_process import LearnerProcess
from server.listener import Listener

log = get_logger("server")

SIGNALS = (signal.SIGTERM, signal.SIGINT)

DRAIN_LOOK = 0.1
"""Seconds between two looks at what still runs."""

LAST_WORDS = 2.0
"""Seconds for requests that are ended to say so."""


class Stop:
    """What was asked for so far."""

    def __init__(self) -> None:
        self.asked = asyncio.Event()
        """To end in good order."""
        self.hurried = asyncio.Event()
        """To end at once."""

    def ask(self) -> None:
        if self.asked.is_set():
            log.warning("ending at once")
            self.hurried.set()
        else:
            self.asked.set()

    @contextlib.contextmanager
    def on_signals(self) -> Iterator[None]:
        """Listen to the signals while inside; after it, they do what they did before."""
        loop = asyncio.get_running_loop()
        before = {number: signal.getsignal(number) for number in SIGNALS}
        for number in SIGNALS:
            loop.add_signal_handler(number, self.ask)
        try:
            yield
        finally:
            for number in SIGNALS:
                loop.remove_signal_handler(number)
                signal.signal(number, before[number])


async def drain(front: Front, keeper: EngineKeeper, stop: Stop, seconds: float) -> None:
    """Take no new requests, and let the running ones end, for so long; then end them."""
    front.change("draining")
    log.info("draining", requests=front.running, seconds=seconds)
    await _until_idle(front, stop, seconds)
    if front.running:
        log.warning("requests are ended unfinished", requests=front.running)
        if keeper.llm is not None:
            keeper.llm.end_requests("The server is shutting down; send the request anew.")
        # They answer for themselves, streams with an event.
        await _until_idle(front, stop, LAST_WORDS)
    front.end_requests()


async def _until_idle(front: Front, stop: Stop, seconds: float) -> None:
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            while front.running and not stop.hurried.is_set():
                await asyncio.sleep(DRAIN_LOOK)


async def at_once(stop: Stop, listener: Listener, learner: LearnerProcess | None) -> None:
    """Wait for a second signal, and then kill whatever is waited for."""
    await stop.hurried.wait()
    listener.force_exit = True
    kill_engine_processes()
    if learner is not None:
        learner.kill()
