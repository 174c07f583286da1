"""The feed's route, and the dashboard's page and files."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Annotated

from fastapi import APIRouter, HTTPException, Query, Request
from starlette.responses import FileResponse, JSONResponse, Response
from starlette.types import Receive, Scope, Send

from server.access import require_figures
from server.feed import Feed, Subscriber, TooManySubscribers, event

router = APIRouter(tags=["paceline"])

HEARTBEAT_S = 5.0
SEND_DEADLINE_S = 30.0
"""Seconds in which a client has to take what is sent, or be left."""

RETRY_AFTER_S = 10

PAGE = Path(__file__).parent / "dashboard"

KINDS = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".svg": "image/svg+xml",
}

POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self'",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
    )
)
GUARDS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


class FeedResponse(Response):
    """An event stream that ends with the feed, with its client, or when its client does not read."""

    def __init__(self, feed: Feed, history_s: float) -> None:
        super().__init__(media_type="text/event-stream")
        self._feed = feed
        self._history_s = history_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            with self._feed.subscribed() as subscriber:
                await self._serve(subscriber, receive, send)
        except TooManySubscribers as error:
            body = {"detail": str(error)}
            response = JSONResponse(body, 503, {"Retry-After": f"{RETRY_AFTER_S}"})
            await response(scope, receive, send)

    async def _serve(self, subscriber: Subscriber, receive: Receive, send: Send) -> None:
        telling = asyncio.ensure_future(self._tell(subscriber, send))
        leaving = asyncio.ensure_future(_gone(receive))
        try:
            await asyncio.wait({telling, leaving}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (telling, leaving):
                task.cancel()
            await asyncio.gather(telling, leaving, return_exceptions=True)

    async def _tell(self, subscriber: Subscriber, send: Send) -> None:
        headers = [
            (b"content-type", b"text/event-stream"),
            (b"cache-control", b"no-store"),
            (b"x-accel-buffering", b"no"),
        ]
        async with asyncio.timeout(SEND_DEADLINE_S):
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            await _send(send, event("history", self._feed.history(self._history_s)))
        async for encoded in subscriber.events(HEARTBEAT_S):
            async with asyncio.timeout(SEND_DEADLINE_S):
                await _send(send, encoded)
        if not subscriber.dropped:
            await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _send(send: Send, body: bytes) -> None:
    await send({"type": "http.response.body", "body": body, "more_body": True})


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


@router.get("/v1/paceline/feed", response_class=Response)
async def get_feed(
    request: Request, history: Annotated[int, Query(ge=0, le=86400)] = 3600
) -> Response:
    """Server-sent events: ``history`` once, then a ``sample`` a second, and every ``change``."""
    require_figures(request)
    return FeedResponse(request.app.state.paceline_feed, history)


@router.get("/dashboard", include_in_schema=False)
async def get_dashboard() -> Response:
    """The page. It holds no data, so it needs no key."""
    return _file("index.html")


@router.get("/dashboard/{name}", include_in_schema=False)
async def get_dashboard_file(name: str) -> Response:
    """A script, a style or a licence of the page's."""
    if name not in FILES:
        raise HTTPException(404, "there is no such file")
    return _file(name)


FILES = frozenset(path.name for path in PAGE.iterdir() if path.suffix in KINDS)


def _file(name: str) -> Response:
    path = PAGE / name
    return FileResponse(path, media_type=KINDS[path.suffix], headers=GUARDS)
