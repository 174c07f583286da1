"""How many requests there may be, how large they may be, and how slowly they may come.

A server that takes every request answers none in time, so what exceeds the places is told at once when to
come back. A place is a request from its first byte to its response's last.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from dataclasses import dataclass

from starlette.types import Message, Receive

MAX_HEAD_BYTES = 64 * 1024
"""Of request line and headers: room for long keys and a proxy's own fields, and no more."""

BODY_DEADLINE = 30.0
"""Seconds a body may take in any case; a client that sends a byte now and then holds a place for nothing."""

BODY_RATE = 64 * 1024
"""Bytes a second that a body must come with beyond that."""

RATE_WINDOW = 60.0
"""Seconds of ended requests that the service rate is measured over."""

FEWEST_ENDS = 3
"""Ended requests that make a rate."""

FIRST_GUESS = 5
"""Seconds to come back after, while no rate is known."""

LONGEST_RETRY = 60
"""Seconds; clients of the openai package follow no longer ones."""


@dataclass(frozen=True)
class Refusal:
    """An answer in place of the one that was asked for."""

    status: int
    code: str
    message: str
    retry_after: int | None = None


def retry_after(waiting: int, ended: int, seconds: float) -> int:
    """Whole seconds until half of those that wait have been served.

    At the first free place the ones turned away would all be back for it; half the line gives many of them
    room. ``ended``: requests that ended within the last ``seconds``.
    """
    if ended < FEWEST_ENDS or seconds <= 0:
        return FIRST_GUESS
    return min(LONGEST_RETRY, max(1, math.ceil(waiting / 2 / (ended / seconds))))


class Places:
    """The requests that are inside. ``running`` of them the engine works on at once, ``waiting`` wait.

    Times are seconds of a clock that never goes back.
    """

    def __init__(self, running: int, waiting: int) -> None:
        self.running = running
        self.waiting = waiting
        self.taken = 0
        self.turned_away = 0
        self._busy_since = 0.0
        """When there last was nobody; rates count time with somebody inside only."""
        self._ends: deque[float] = deque()

    def enter(self, now: float) -> Refusal | None:
        """Take a place; why not, when there is none."""
        if self.taken >= self.running + self.waiting:
            self.turned_away += 1
            return Refusal(
                429,
                "overloaded",
                f"{self.running} requests are running and {self.waiting} wait already; try again later.",
                self._retry_after(now),
            )
        if self.taken == 0:
            self._busy_since = now
            self._ends.clear()
        self.taken += 1
        return None

    def leave(self, now: float) -> None:
        """Give the place back."""
        self.taken -= 1
        self._ends.append(now)
        while self._ends and now - self._ends[0] > RATE_WINDOW:
            self._ends.popleft()

    def _retry_after(self, now: float) -> int:
        recent = [end for end in self._ends if now - end <= RATE_WINDOW]
        return retry_after(self.waiting, len(recent), min(RATE_WINDOW, now - self._busy_since))


class Body:
    """``receive`` with a limit of size and time until the body is complete; then as it was.

    Where one is broken, ``refusal`` is set and the app is told that the client has gone.
    """

    def __init__(self, receive: Receive, most_bytes: int) -> None:
        self.refusal: Refusal | None = None
        self._receive = receive
        self._most = most_bytes
        self._bytes = 0
        self._complete = False
        self._begun = asyncio.get_running_loop().time()

    async def __call__(self) -> Message:
        if self._complete:
            return await self._receive()
        if self.refusal is not None:
            return {"type": "http.disconnect"}
        try:
            async with asyncio.timeout_at(self._begun + BODY_DEADLINE + self._bytes / BODY_RATE):
                message = await self._receive()
        except TimeoutError:
            return self._refuse(408, "slow_body", "The request's body came too slowly.")
        if message["type"] == "http.request":
            self._bytes += len(message.get("body", b""))
            self._complete = not message.get("more_body", False)
            if self._bytes > self._most:
                return self._refuse(413, "too_large", too_large(self._most))
        return message

    def _refuse(self, status: int, code: str, why: str) -> Message:
        self.refusal = Refusal(status, code, why)
        return {"type": "http.disconnect"}


def too_large(most_bytes: int) -> str:
    return f"A request's body may have {most_bytes} bytes; this one has more."


def check_head(
    headers: list[tuple[bytes, bytes]], most_fields: int, most_head: int, most_body: int
) -> Refusal | None:
    """Whether a request's headers are too many or too long, or announce too long a body."""
    if len(headers) > most_fields or sum(len(n) + len(v) for n, v in headers) > most_head:
        return Refusal(
            431, "headers_too_large", f"At most {most_fields} headers of {most_head} bytes in all."
        )
    for name, value in headers:
        if name == b"content-length" and value.isdigit() and int(value[:20]) > most_body:
            return Refusal(413, "too_large", too_large(most_body))
    return None
