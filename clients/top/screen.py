"""The live screen: keys in, frames out, and the terminal as it was when it ends."""

from __future__ import annotations

import contextlib
import os
import queue
import select
import sys
import termios
import time
import tty
from collections.abc import Callable, Iterator

from rich.console import Console
from rich.live import Live
from rich.text import Text

from clients.client import PacelineAPIError
from clients.top.frame import frame
from clients.top.reader import FeedReader, Lost
from clients.top.state import TopState

LOOK_S = 0.1
"""Between two looks at keys, events and the terminal's size."""

REDRAW_S = 1.0
"""Between two frames when nothing happens: the age of the newest sample is on it."""


def watch(console: Console, reader: FeedReader, state: TopState) -> None:
    """Show frames until ``q`` or Ctrl-C. Raises PacelineAPIError when the server refuses the feed."""
    with _keys() as quit_asked, Live(console=console, screen=True, auto_refresh=False) as live:
        drawn, shown = 0.0, (0, 0)
        while not quit_asked(LOOK_S):
            news = _take_all(reader, state)
            size = (console.size.width, console.size.height)
            if news or size != shown or time.monotonic() - drawn >= REDRAW_S:
                live.update(joined(state, size[0], size[1]), refresh=True)
                drawn, shown = time.monotonic(), size


def joined(state: TopState, width: int, height: int | None) -> Text:
    return Text("\n", no_wrap=True).join(frame(state, width, height, time.time()))


def _take_all(reader: FeedReader, state: TopState) -> bool:
    """Whether anything was there to take."""
    news = False
    with contextlib.suppress(queue.Empty):
        while True:
            event = reader.events.get_nowait()
            news = True
            if isinstance(event, PacelineAPIError):
                raise event
            if isinstance(event, Lost):
                state.lost(str(event))
            else:
                state.take(event)
    return news


@contextlib.contextmanager
def _keys() -> Iterator[Callable[[float], bool]]:
    """Waits so many seconds for a key; True when one asks to leave. The terminal's settings are put back."""
    descriptor = sys.stdin.fileno()
    before = termios.tcgetattr(descriptor)

    def quit_asked(seconds: float) -> bool:
        ready, _, _ = select.select([descriptor], [], [], seconds)
        keys = os.read(descriptor, 64) if ready else None
        return keys is not None and (not keys or b"q" in keys.lower())

    try:
        tty.setcbreak(descriptor)
        yield quit_asked
    finally:
        termios.tcsetattr(descriptor, termios.TCSADRAIN, before)
