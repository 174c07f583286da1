"""Clients that are refused with 429 come back by themselves, when they were told to."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from typing import Any

import anthropic
import httpx
import openai
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from server import overload
from server.front import Front
from tests.clients.stub import running

MESSAGE = {
    "id": "m", "type": "message", "role": "assistant", "model": "one", "stop_reason": "end_turn",
    "stop_sequence": None, "content": [{"type": "text", "text": "yes"}],
    "usage": {"input_tokens": 1, "output_tokens": 1},
}  # fmt: skip
CHAT = {
    "id": "c", "object": "chat.completion", "created": 0, "model": "one",
    "choices": [
        {"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": "yes"}}
    ],
}  # fmt: skip
ASK: dict[str, Any] = {
    "model": "one", "max_tokens": 4, "messages": [{"role": "user", "content": "Is there room?"}],
}  # fmt: skip


class OnePlace:
    """The server's front with a place for one request; POST /hold takes it until it is released."""

    def __init__(self) -> None:
        inner = Starlette(
            routes=[
                Route("/hold", self.hold, methods=["POST"]),
                Route("/v1/messages", lambda request: JSONResponse(MESSAGE), methods=["POST"]),
                Route("/v1/chat/completions", lambda request: JSONResponse(CHAT), methods=["POST"]),
            ]
        )
        self.front = Front(overload.Places(1, 0), most_body=10**6, most_fields=100)
        self.front.inner = inner
        self.front.change("ready")
        self.app: Any = self.front
        self.url = ""
        self.released = threading.Event()

    async def hold(self, request: Request) -> JSONResponse:
        await asyncio.to_thread(self.released.wait, 30)
        return JSONResponse({})


@pytest.fixture
def full(monkeypatch: pytest.MonkeyPatch) -> Iterator[OnePlace]:
    """Its place is taken for half a second; refused clients are told to come back in one."""
    monkeypatch.setattr(overload, "FIRST_GUESS", 1)
    with running(OnePlace()) as server:
        root = server.url.removesuffix("/v1")
        holder = threading.Thread(
            target=lambda: httpx.post(f"{root}/hold", timeout=60, trust_env=False)
        )
        holder.start()
        deadline = time.monotonic() + 20
        while server.front.places.taken == 0 and time.monotonic() < deadline:
            time.sleep(0.01)
        release = threading.Timer(0.5, server.released.set)
        release.start()
        try:
            yield server
        finally:
            server.released.set()
            release.cancel()
            holder.join(20)


def openais(server: OnePlace, retries: int) -> openai.OpenAI:
    return openai.OpenAI(base_url=server.url, api_key="none", max_retries=retries, timeout=20)


def anthropics(server: OnePlace, retries: int) -> anthropic.Anthropic:
    root = server.url.removesuffix("/v1")
    return anthropic.Anthropic(base_url=root, api_key="none", max_retries=retries, timeout=20)


def test_openais_client_knows_the_refusal_and_comes_back_when_told(full: OnePlace) -> None:
    with pytest.raises(openai.RateLimitError) as refused:
        openais(full, retries=0).chat.completions.create(**ASK)
    assert refused.value.response.headers["retry-after"] == "1"
    assert refused.value.code == "overloaded"
    begun = time.monotonic()
    answer = openais(full, retries=5).chat.completions.create(**ASK)
    assert answer.choices[0].message.content == "yes"
    assert full.front.refused["overloaded"] >= 2
    assert time.monotonic() - begun >= 0.9  # not sooner than it was told


def test_anthropics_client_knows_the_refusal_and_comes_back_when_told(full: OnePlace) -> None:
    with pytest.raises(anthropic.RateLimitError) as refused:
        anthropics(full, retries=0).messages.create(**ASK)
    assert refused.value.response.headers["retry-after"] == "1"
    begun = time.monotonic()
    answer = anthropics(full, retries=5).messages.create(**ASK)
    assert answer.content[0].text == "yes"
    assert full.front.refused["overloaded"] >= 2
    assert time.monotonic() - begun >= 0.9


def test_openais_async_clients_share_one_place_by_coming_back(full: OnePlace) -> None:
    async def run() -> list[str]:
        async with openai.AsyncOpenAI(
            base_url=full.url, api_key="none", max_retries=8, timeout=20
        ) as client:
            answers = await asyncio.gather(
                *(client.chat.completions.create(**ASK) for _ in range(4))
            )
        return [answer.choices[0].message.content for answer in answers]

    assert asyncio.run(run()) == ["yes"] * 4
    assert full.front.refused["overloaded"] >= 4
