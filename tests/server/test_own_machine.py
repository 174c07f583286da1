"""A server without a key takes nothing from pages of elsewhere."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest

from server.access import Access, Gate
from server.own_machine import stranger
from server.quotas import Quotas

HERE = ("localhost", "localhost:8000", "127.0.0.1:8000", "127.8.0.1", "[::1]:8000", "a.localhost:1")
ELSEWHERE = (
    "evil.example",
    "evil.example:8000",
    "10.0.0.1",
    "localhost.evil.example",
    "[::2]",
    "",
    "[",
)


@pytest.mark.parametrize("host", HERE)
def test_names_of_this_machine_are_served(host: str) -> None:
    assert stranger({b"host": host.encode()}) is None
    assert stranger({b"host": host.encode(), b"origin": f"http://{host}".encode()}) is None


@pytest.mark.parametrize("host", ELSEWHERE)
def test_a_name_that_only_resolves_here_is_not_served(host: str) -> None:
    assert "only this machine" in (stranger({b"host": host.encode()}) or "")


@pytest.mark.parametrize(
    "origin", ["http://evil.example", "https://10.0.0.1:8000", "null", "file://"]
)
def test_a_page_of_elsewhere_is_not_served(origin: str) -> None:
    said = stranger({b"host": b"127.0.0.1:8000", b"origin": origin.encode()})
    assert "only pages of this machine" in (said or "")


def test_programs_send_no_origin_and_are_served() -> None:
    assert stranger({b"host": b"127.0.0.1:8000"}) is None
    assert stranger({}) is None


async def _ok(scope: Any, receive: Any, send: Any) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b"{}"})


def _status(gate: Gate, refused: dict[str, int], headers: dict[str, str]) -> int:
    async def ask() -> int:
        app = Access(_ok, gate, Quotas(), refused)
        transport = httpx.ASGITransport(app=app)
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1:8000") as http:
            path = "/v1/paceline/drafts/rollback"
            return (await http.post(path, headers=headers)).status_code

    return asyncio.run(ask())


def test_only_a_server_without_a_key_goes_by_the_names_and_counts_what_it_refuses() -> None:
    refused: dict[str, int] = {}
    page = {"origin": "http://evil.example"}
    assert _status(Gate(), refused, {}) == 200
    assert _status(Gate(), refused, page) == 403
    key = {"authorization": "Bearer k"}
    assert _status(Gate(api_key="k"), refused, page | key) == 200
    assert _status(Gate(api_key="k"), refused, page) == 401
    assert refused == {"not_this_machine": 1, "invalid_api_key": 1}
