"""The HTTP server itself: uvicorn over our socket, with limits that uvicorn does not have.

A request's head (request line and headers) has a size and a deadline, and so has a client to take its answer;
uvicorn's parser for speed has none of them. Signals are ours (see ``server.shutdown``). Read against uvicorn
0.54: ``Server`` and ``HttpToolsProtocol``.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from argparse import Namespace
from collections.abc import AsyncIterator, Generator
from typing import Any

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from rlcore.errors import PacelineError
from server.overload import MAX_HEAD_BYTES

KEEP_ALIVE = 5
"""Seconds an idle connection is kept."""

HEAD_DEADLINE = 30.0
"""Seconds from the first byte of a request, or from connecting, to the end of its headers."""

SEND_DEADLINE = 120.0
"""Seconds within which a client takes something of an answer that waits to be sent. One that does not has
gone for all we know: its connection is cut, which ends its request and gives its place back."""

LINGER = 2
"""Seconds that responses which were ended are given to leave, before connections are cut."""


class ListenError(PacelineError):
    """The server cannot listen like this."""


class LimitedProtocol(HttpToolsProtocol):
    """Cuts a connection whose head is too long or too slow, or whose client does not read its answer."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._head_bytes = 0
        self._head_timer: asyncio.TimerHandle | None = None
        self._send_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._begin_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._end_head()
        self._end_send()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._begin_send()

    def resume_writing(self) -> None:
        self._end_send()
        super().resume_writing()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._begin_head()

    def on_headers_complete(self) -> None:
        self._end_head()
        super().on_headers_complete()

    def data_received(self, data: bytes) -> None:
        self._head_bytes += len(data)
        super().data_received(data)
        # Past the limit in one piece: that piece was bounded by the transport, and the app refuses it.
        if self._head_timer is not None and self._head_bytes > MAX_HEAD_BYTES:
            self._refuse(b"431 Request Header Fields Too Large")

    def _begin_head(self) -> None:
        self._end_head()
        self._head_bytes = 0
        self._head_timer = self.loop.call_later(HEAD_DEADLINE, self._refuse, b"408 Request Timeout")

    def _end_head(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _begin_send(self) -> None:
        self._end_send()
        left = self.transport.get_write_buffer_size()
        self._send_timer = self.loop.call_later(SEND_DEADLINE, self._look_at_send, left)

    def _look_at_send(self, before: int) -> None:
        # While writing is paused nothing is added, so any progress makes it less.
        if self.transport.get_write_buffer_size() < before:
            self._begin_send()
        else:
            self.transport.abort()

    def _end_send(self) -> None:
        if self._send_timer is not None:
            self._send_timer.cancel()
            self._send_timer = None

    def _refuse(self, status: bytes) -> None:
        self._end_head()
        if not self.transport.is_closing():
            self.transport.write(
                b"HTTP/1.1 %b\r\nconnection: close\r\ncontent-length: 0\r\n\r\n" % status
            )
            self.transport.close()


class Listener(uvicorn.Server):
    """uvicorn's server without its signal handlers."""

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield


def make_listener(app: ASGIApp, args: Namespace) -> Listener:
    """``args``: vLLM's, for TLS. Raises ListenError where its files cannot be used."""
    config = uvicorn.Config(
        app,
        http=LimitedProtocol,
        lifespan="off",  # the inner app's is entered when there is an engine
        log_level="warning",
        access_log=False,
        timeout_keep_alive=KEEP_ALIVE,
        timeout_graceful_shutdown=LINGER,
        ssl_keyfile=args.ssl_keyfile,
        ssl_certfile=args.ssl_certfile,
        ssl_ca_certs=args.ssl_ca_certs,
        ssl_cert_reqs=args.ssl_cert_reqs,
        ssl_ciphers=args.ssl_ciphers,
    )
    try:
        config.load()
    except OSError as error:  # an SSLError is one
        raise ListenError(f"the TLS files cannot be used: {error}") from None
    return Listener(config)


@contextlib.asynccontextmanager
async def listening(listener: Listener, sock: socket.socket) -> AsyncIterator[None]:
    """Accept connections while inside."""
    task = asyncio.ensure_future(listener.serve(sockets=[sock]))
    try:
        yield
    finally:
        listener.should_exit = True
        await task
