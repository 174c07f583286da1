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
from collections.abc import Callable, Iterable
from typing import Literal

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from server.overload import LONGEST_RETRY, MAX_HEAD_BYTES, Body, Places, Refusal, check_head

State = Literal["starting", "ready", "restarting", "draining", "failed"]

LIVE, READY = "/health", "/ready"

OBSERVED = ("/metrics", "/dashboard", "/v1/paceline/", "/v1/models", "/version")
"""GET routes that need no engine: still answered while it is started again, or while requests end."""

DELETED = ("/v1/paceline/tenants/",)
"""DELETE routes that need none: a purge is the learner's work."""

START_DEADLINE = 1800.0
"""Seconds an engine is given to come up; after them the server counts as dead, and is ended. Large models
take many minutes to load."""

FIRST_GUESS = 15.0
"""Seconds to come back after, before any start was measured."""

WORDS: dict[State, str] = {
    "starting": "The server is starting; the model is being loaded.",
    "ready": "The server is ready.",
    "restarting": "The engine has died and is being started again.",
    "draining": "The server is shutting down and takes no new requests.",
    "failed": "The engine has died and does not come back; the server is ending.",
}


KINDS = {429: "rate_limit_error", 503: "service_unavailable", 408: "timeout_error"}
"""Types of errors, as OpenAI has them."""


class Front:
    """``inner`` is the app behind it; ``state`` says whether it is asked."""

    def __init__(self, places: Places, most_body: int, most_fields: int) -> None:
        """Bytes of a request's body, and its headers, at most."""
        self.inner: ASGIApp | None = None
        self.places = places
        self.most_body = most_body
        self.most_fields = most_fields
        self.refused: dict[str, int] = {}
        """Requests answered here instead of inside, by code."""
        self.engine_died: Callable[[], bool] = lambda: False
        """Known at once, where the state is known a moment later."""
        self._state: State = "starting"
        self._since = time.monotonic()
        self._last_start: float | None = None
        """Seconds the last start took."""
        self._running: set[asyncio.Task[None] | None] = set()
        self._observing = 0
        self._ending = False

    @property
    def state(self) -> State:
        return "restarting" if self._state == "ready" and self.engine_died() else self._state

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
        if self._state in ("starting", "restarting"):
            return time.monotonic() - self._since < START_DEADLINE
        return self._state != "failed"

    def change(self, state: State) -> None:
        """Enter a state. Once it drains or has failed, it is never ready again."""
        if self._state in ("draining", "failed") and state != "failed":
            return
        now = time.monotonic()
        if state == "ready":
            self._last_start = now - self._since
        self._state, self._since = state, now

    def retry_after(self) -> int:
        """Whole seconds after which asking again is worth it."""
        if self.state in ("starting", "restarting"):
            expected = self._last_start if self._last_start is not None else FIRST_GUESS
            # The restart of an engine that has only just died has not begun.
            waited = 0.0 if self._state == "ready" else time.monotonic() - self._since
            left = expected - waited
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
        elif scope["type"] == "websocket" and self.inner is not None and self.ready:
            await self.inner(scope, receive, send)
        elif (
            scope["type"] == "http"
            and self.inner is not None
            and (self.ready or _needs_no_engine(scope))
        ):
            await self._let_in(self.inner, scope, receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1013})
        elif scope["type"] == "http":
            await self._turn_away(send)

    async def _probe(self, scope: Scope, send: Send) -> None:
        """Needs no key, so it says the state and nothing else."""
        well = self.live if scope["path"] == LIVE else self.ready
        headers = [] if well else [(b"retry-after", str(self.retry_after()).encode())]
        if scope["method"] not in ("GET", "HEAD"):
            refusal = Refusal(405, "method_not_allowed", "Only GET and HEAD.")
            await self._refuse(send, refusal)
            return
        body = {"status": self.state}
        await answer(send, 200 if well else 503, body, [*headers, (b"cache-control", b"no-store")])

    async def _turn_away(self, send: Send) -> None:
        state = self.state
        refusal = Refusal(503, state, WORDS[state], self.retry_after())
        # A client that keeps the connection would come back to a server that is leaving.
        await self._refuse(send, refusal, close=state in ("draining", "failed"))

    async def _refuse(self, send: Send, refusal: Refusal, close: bool = False) -> None:
        self.refused[refusal.code] = self.refused.get(refusal.code, 0) + 1
        headers = []
        if refusal.retry_after is not None:
            headers.append((b"retry-after", str(refusal.retry_after).encode()))
        if close:
            headers.append((b"connection", b"close"))
        kind = KINDS.get(refusal.status, "invalid_request_error")
        error = {"message": refusal.message, "type": kind, "param": None, "code": refusal.code}
        await answer(send, refusal.status, {"error": error}, headers)

    async def _let_in(self, inner: ASGIApp, scope: Scope, receive: Receive, send: Send) -> None:
        """Within the limits."""
        refusal = check_head(scope["headers"], self.most_fields, MAX_HEAD_BYTES, self.most_body)
        if refusal is not None:
            await self._refuse(send, refusal, close=True)
            return
        if not _takes_a_place(scope):
            await self._pass_on(inner, scope, receive, send)
            return
        refusal = self.places.enter(time.monotonic())
        if refusal is not None:
            await self._refuse(send, refusal)
            return
        try:
            await self._pass_on(inner, scope, receive, send)
        finally:
            self.places.leave(time.monotonic())

    async def _pass_on(self, inner: ASGIApp, scope: Scope, receive: Receive, send: Send) -> None:
        started = complete = False
        body = Body(receive, self.most_body)

        async def send_on(message: Message) -> None:
            nonlocal started, complete
            if body.refusal is not None and not started:
                return  # the app believes that the client has gone
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
            await inner(scope, body, send_on)
        except asyncio.CancelledError:
            if not self._ending:
                raise
            if not started:
                await self._turn_away(send)
            elif not complete:
                await send({"type": "http.response.body", "body": b"", "more_body": False})
        except Exception:
            if body.refusal is None:
                raise
        finally:
            self._running.discard(task)
            self._observing -= observes
        if body.refusal is not None and not started:
            await self._refuse(send, body.refusal, close=True)


def _observes(scope: Scope) -> bool:
    return scope["method"] in ("GET", "HEAD") and str(scope["path"]).startswith(OBSERVED)


def _needs_no_engine(scope: Scope) -> bool:
    return _observes(scope) or (
        scope["method"] == "DELETE" and str(scope["path"]).startswith(DELETED)
    )


def _add_retry(message: Message, seconds: int) -> None:
    headers = message.get("headers", [])
    if all(name.lower() != b"retry-after" for name, _ in headers):
        message["headers"] = [*headers, (b"retry-after", str(seconds).encode())]


def _takes_a_place(scope: Scope) -> bool:
    """Whether the engine may have to work for it; our own routes and reading cost next to nothing."""
    return scope["method"] == "POST" and not str(scope["path"]).startswith("/v1/paceline/")


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
