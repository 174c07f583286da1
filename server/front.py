"""The outermost app: owns the socket from the moment the server listens, whatever the engine is doing.

It answers liveness and readiness itself, turns requests away with 503 while nothing could serve them, and
passes everything else to the inner app: access, accounting, vLLM's routes and ours. Plain ASGI; a stream
passes through chunk by chunk.
"""

from __future__ import annotations

import asyncio
import json
import math
import time
from collections.abc import Iterable
from typing import Literal

from starlette.types import ASGIApp, Message, Receive, Scope, Send

State = Literal["starting", "ready", "restarting", "draining", "failed"]

LIVE, READY = "/health", "/ready"

OBSERVED = ("/metrics", "/dashboard", "/v1/paceline/", "/v1/models", "/version")
"""GET routes that need no engine: still answered while it is started again, or while requests end."""

START_DEADLINE = 1800.0
"""Seconds an engine is given to come up; after them the server counts as dead, and is ended. Large models
take many minutes to load."""

FIRST_GUESS = 15.0
"""Seconds to come back after, before any start was measured."""

LONGEST_RETRY = 60
"""Seconds; clients of the openai package follow no longer ones."""

WORDS: dict[State, str] = {
    "starting": "The server is starting; the model is being loaded.",
    "ready": "The server is ready.",
    "restarting": "The engine has died and is being started again.",
    "draining": "The server is shutting down and takes no new requests.",
    "failed": "The engine has died and does not come back; the server is ending.",
}


class Front:
    """``inner`` is the app behind it; ``state`` says whether it is asked."""

    def __init__(self) -> None:
        self.inner: ASGIApp | None = None
        self.state: State = "starting"
        self._since = time.monotonic()
        self._last_start: float | None = None
        """Seconds the last start took."""
        self._running: set[asyncio.Task[None] | None] = set()
        self._observing = 0
        self._ending = False

    @property
    def ready(self) -> bool:
        return self.state == "ready"

    @property
    def running(self) -> int:
        """Requests under way that will end; streams that only observe have no end."""
        return len(self._running) - self._observing

    @property
    def live(self) -> bool:
        """Whether there is an engine, or one will be soon."""
        if self.state in ("starting", "restarting"):
            return time.monotonic() - self._since < START_DEADLINE
        return self.state != "failed"

    def change(self, state: State) -> None:
        """Enter a state. Once it drains or has failed, it is never ready again."""
        if self.state in ("draining", "failed") and state != "failed":
            return
        now = time.monotonic()
        if state == "ready":
            self._last_start = now - self._since
        self.state, self._since = state, now

    def retry_after(self) -> int:
        """Whole seconds after which asking again is worth it."""
        if self.state in ("starting", "restarting"):
            expected = self._last_start if self._last_start is not None else FIRST_GUESS
            left = expected - (time.monotonic() - self._since)
            return min(LONGEST_RETRY, max(1, math.ceil(left)))
        return round(FIRST_GUESS)

    def end_requests(self) -> None:
        """End what still runs, streams without an end of their own too, each with a complete response."""
        self._ending = True
        for task in self._running:
            if task is not None:
                task.cancel()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] in (LIVE, READY):
            await self._probe(scope, send)
        elif self.inner is not None and (self.ready or _observes(scope)):
            await self._pass_on(self.inner, scope, receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1013})
        elif scope["type"] == "http":
            await self._turn_away(send)

    async def _probe(self, scope: Scope, send: Send) -> None:
        """Needs no key, so it says the state and nothing else."""
        well = self.live if scope["path"] == LIVE else self.ready
        headers = [] if well else [(b"retry-after", str(self.retry_after()).encode())]
        if scope["method"] not in ("GET", "HEAD"):
            await answer(send, 405, _error(405, "method_not_allowed", "Only GET and HEAD."))
            return
        body = {"status": self.state}
        await answer(send, 200 if well else 503, body, [*headers, (b"cache-control", b"no-store")])

    async def _turn_away(self, send: Send) -> None:
        # The connection ends too: a client that keeps it would come back to a server that is leaving.
        headers = [(b"retry-after", str(self.retry_after()).encode())]
        if self.state in ("draining", "failed"):
            headers.append((b"connection", b"close"))
        await answer(send, 503, _error(503, self.state, WORDS[self.state]), headers)

    async def _pass_on(self, inner: ASGIApp, scope: Scope, receive: Receive, send: Send) -> None:
        started = complete = False

        async def send_on(message: Message) -> None:
            nonlocal started, complete
            if message["type"] == "http.response.start":
                started = True
                if message["status"] == 503:
                    _add_retry(message, self.retry_after())
            elif message["type"] == "http.response.body":
                complete = not message.get("more_body", False)
            await send(message)

        task, observes = asyncio.current_task(), _observes(scope)
        self._running.add(task)
        self._observing += observes
        try:
            await inner(scope, receive, send_on)
        except asyncio.CancelledError:
            if not self._ending or scope["type"] != "http":
                raise
            if not started:
                await self._turn_away(send)
            elif not complete:
                await send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            self._running.discard(task)
            self._observing -= observes


def _observes(scope: Scope) -> bool:
    return (
        scope["type"] == "http"
        and scope["method"] in ("GET", "HEAD")
        and str(scope["path"]).startswith(OBSERVED)
    )


def _add_retry(message: Message, seconds: int) -> None:
    headers = message.get("headers", [])
    if all(name.lower() != b"retry-after" for name, _ in headers):
        message["headers"] = [*headers, (b"retry-after", str(seconds).encode())]


def _error(status: int, code: str, message: str) -> dict[str, object]:
    kind = "service_unavailable" if status == 503 else "invalid_request_error"
    return {"error": {"message": message, "type": kind, "param": None, "code": code}}


async def answer(
    send: Send, status: int, body: object, headers: Iterable[tuple[bytes, bytes]] = ()
) -> None:
    """A whole JSON response."""
    content = json.dumps(body).encode()
    fixed = [
        (b"content-type", b"application/json"),
        (b"content-length", str(len(content)).encode()),
    ]
    await send({"type": "http.response.start", "status": status, "headers": [*fixed, *headers]})
    await send({"type": "http.response.body", "body": content})
