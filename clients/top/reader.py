"""Reads the feed in a thread, connecting anew for as long as it takes."""

from __future__ import annotations

import queue
import threading

from clients.client import PacelineAPIError, PacelineClient
from clients.events import FeedEvent
from clients.top.state import SPAN_S

FIRST_PAUSE_S = 0.5
LONGEST_PAUSE_S = 5.0

REFUSED = frozenset({401, 403, 404})
"""Asking again changes nothing: a key is missing, or this server has no feed."""


class Lost(Exception):
    """The connection ended or could not be made; the reader tries again."""


class FeedReader:
    """``events`` gets what the feed says, Lost when it ends, and PacelineAPIError when it is refused."""

    def __init__(self, client: PacelineClient) -> None:
        self._client = client
        self.events: queue.SimpleQueue[FeedEvent | Lost | PacelineAPIError] = queue.SimpleQueue()
        self._stop = threading.Event()
        # A daemon: it may be within a read when the program ends.
        self._thread = threading.Thread(target=self._run, name="feed", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()

    def _run(self) -> None:
        pause = FIRST_PAUSE_S
        while not self._stop.is_set():
            reason = "the server ended the feed"
            try:
                for event in self._client.paceline.feed(SPAN_S):
                    pause = FIRST_PAUSE_S
                    self.events.put(event)
                    if self._stop.is_set():
                        return
            except PacelineAPIError as error:
                if error.status in REFUSED:
                    self.events.put(error)
                    return
                reason = error.message
            self.events.put(Lost(reason))
            self._stop.wait(pause)
            pause = min(LONGEST_PAUSE_S, 2 * pause)
