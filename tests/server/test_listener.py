"""The HTTP server's own limits, over real sockets."""

from __future__ import annotations

import asyncio
import socket
from argparse import Namespace
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any
from unittest import mock

import pytest
import uvicorn
from starlette.responses import StreamingResponse
from starlette.types import ASGIApp
from uvicorn.server import ServerState

from server import listener as listener_module
from server.front import Front
from server.listener import LimitedProtocol, listening, make_listener
from server.overload import MAX_HEAD_BYTES, Places
from tests.server.test_front import inside

NO_TLS = Namespace(
    ssl_keyfile=None, ssl_certfile=None, ssl_ca_certs=None, ssl_cert_reqs=0, ssl_ciphers=None
)

Client = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


def with_server(client: Client, ready: bool = True, app: ASGIApp = inside) -> Front:
    """Run ``client`` on a connection to a front over ``app``; the front."""
    front = Front(Places(2, 2), most_body=100_000, most_fields=50)
    front.inner = app

    async def run() -> None:
        if ready:
            front.change("ready")
        sock = socket.socket()
        sock.bind(("127.0.0.1", 0))
        port = sock.getsockname()[1]
        with sock:
            async with listening(make_listener(front, NO_TLS), sock):
                await asyncio.sleep(0.05)
                reader, writer = await asyncio.open_connection("127.0.0.1", port)
                async with asyncio.timeout(10):
                    await client(reader, writer)
                writer.close()

    asyncio.run(run())
    return front


async def status(reader: asyncio.StreamReader) -> int:
    return int((await reader.readline()).split()[1])


def test_the_socket_answers_before_there_is_an_engine():
    async def client(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"GET /v1/responses HTTP/1.1\r\nhost: x\r\n\r\n")
        assert await status(reader) == 503
        assert b"retry-after" in await reader.readuntil(b"\r\n\r\n")

    with_server(client, ready=False)


def test_a_head_without_end_is_cut_off():
    async def client(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"GET / HTTP/1.1\r\n")
        sent = 0
        while sent < 100 * MAX_HEAD_BYTES:
            try:
                writer.write(b"a: " + b"b" * 8000 + b"\r\n")
                await writer.drain()
            except ConnectionError:
                break
            sent += 8000
            await asyncio.sleep(0)
        assert sent < 100 * MAX_HEAD_BYTES

    with_server(client)


def test_a_long_head_in_one_piece_is_refused():
    async def client(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"GET / HTTP/1.1\r\na: " + b"b" * (MAX_HEAD_BYTES + 1) + b"\r\n\r\n")
        assert await status(reader) == 431

    with_server(client)


@pytest.mark.parametrize("sent", [b"", b"POST /v1/x HTTP/1.1\r\nhost:"])
def test_a_head_that_does_not_come_is_given_up(sent: bytes, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(listener_module, "HEAD_DEADLINE", 0.3)

    async def client(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(sent)
        assert await status(reader) == 408
        await reader.read()
        assert reader.at_eof()

    with_server(client)


def test_a_request_in_time_and_the_next_one_on_the_same_connection_pass(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(listener_module, "HEAD_DEADLINE", 0.3)

    async def client(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for _ in range(3):
            writer.write(b"POST /v1/x HTTP/1.1\r\nhost: x\r\ncontent-length: 4\r\n\r\nab")
            await asyncio.sleep(0.5)  # of the body's time, not the head's
            writer.write(b"cd")
            assert await status(reader) == 200
            await reader.readuntil(b"inside\r\n0\r\n\r\n")

    with_server(client)


def test_a_client_that_does_not_read_its_answer_loses_its_place(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(listener_module, "SEND_DEADLINE", 0.3)
    ended = asyncio.Event()

    async def endless() -> AsyncIterator[bytes]:
        while True:
            yield b"x" * 65536
            await asyncio.sleep(0)

    async def app(scope: Any, receive: Any, send: Any) -> None:
        try:
            await StreamingResponse(endless())(scope, receive, send)
        finally:
            ended.set()

    async def client(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"POST /v1/x HTTP/1.1\r\nhost: x\r\ncontent-length: 0\r\n\r\n")
        await ended.wait()

    assert with_server(client, app=app).places.taken == 0


def test_a_client_that_reads_slowly_is_waited_for(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(listener_module, "SEND_DEADLINE", 0.05)

    async def run() -> None:
        transport = mock.Mock()
        transport.get_extra_info.return_value = None
        transport.get_write_buffer_size.return_value = 100_000
        protocol = LimitedProtocol(uvicorn.Config(inside), ServerState(), {})
        protocol.connection_made(transport)
        protocol.pause_writing()
        for left in range(90_000, 40_000, -10_000):
            await asyncio.sleep(0.04)
            transport.get_write_buffer_size.return_value = left
        assert not transport.abort.called
        await asyncio.sleep(0.2)
        assert transport.abort.called

    asyncio.run(run())
