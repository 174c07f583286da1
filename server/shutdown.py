"""SIGTERM and SIGINT: the first one asks for a drain, the second one for an end at once."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import Iterator

from rlcore.log import get_logger

log = get_logger("server")

SIGNALS = (signal.SIGTERM, signal.SIGINT)


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
