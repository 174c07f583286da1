"""A small server in a model's place, over real sockets; it misbehaves on request."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from typing import Any, Protocol, TypeVar

import uvicorn
from fastapi import FastAPI, HTTPException, Request
from fastapi.responses import StreamingResponse

COUNT = {
    "version": 4,
    "steps": 2,
    "plain_steps": 1,
    "emitted": 5,
    "drafted": [2, 2],
    "accepted": [2, 1],
    "length": 2.5,
}
PAUSE = 0.2


class Stub:
    """Answers with the words of the prompt; the prompt's first word says how."""

    def __init__(self) -> None:
        self.app = FastAPI()
        self.app.get("/v1/models")(self.models)
        self.app.post("/v1/chat/completions", response_model=None)(self.chat)
        self.bodies: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.running = self.most_running = 0
        self.url = ""

    async def models(self) -> dict[str, Any]:
        return {
            "object": "list",
            "data": [{"id": "stub", "object": "model", "created": 0, "owned_by": "x"}],
        }

    async def chat(self, request: Request) -> StreamingResponse:
        body = await request.json()
        self.bodies.append(body)
        self.headers.append(dict(request.headers))
        how, *words = body["messages"][-1]["content"].split()
        if how == "refuse":
            raise HTTPException(500, "no")
        stream = self.stream(how, words)
        return StreamingResponse(
            stream, media_type="text/event-stream", headers={"x-paceline-draft-version": "4"}
        )

    async def stream(self, how: str, words: list[str]) -> AsyncIterator[str]:
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        try:
            async for chunk in self.chunks(how, words):
                yield f"data: {json.dumps(chunk)}\n\n"
            if how != "cut":
                yield "data: [DONE]\n\n"
        finally:
            self.running -= 1

    async def chunks(self, how: str, words: list[str]) -> AsyncIterator[dict[str, Any]]:
        yield chunk({"role": "assistant", "content": ""})
        for i, word in enumerate(words):
            await asyncio.sleep(PAUSE if how == "pause" and i == 2 else 0.01)
            if how == "hang" and i == 1:
                await asyncio.sleep(60)
            if how == "break" and i == 1:
                yield {"error": {"message": "engine died", "code": 500}}
                return
            if how == "anew" and i == 1:
                yield chunk({"role": "assistant", "content": ""})
            yield chunk(
                {"content": word}, name="b" if how == "other" and i else "a", token_ids=[i, i]
            )
        if how == "cut":
            return
        yield chunk({}, finish_reason="length", token_ids=[])
        if how != "unpaid":
            usage: dict[str, Any] = {
                "prompt_tokens": 3,
                "completion_tokens": 2 * len(words),
                "total_tokens": 9,
            }
            versions: list[Any] = [{"steps": 1}] if how == "badcount" else [COUNT]
            yield {
                **chunk({}),
                "choices": [],
                "usage": usage | {"paceline": {"versions": versions}},
            }


def chunk(
    delta: dict[str, Any], *, name: str = "a", finish_reason: str | None = None, **more: Any
) -> dict[str, Any]:
    choice = {"index": 0, "delta": delta, "finish_reason": finish_reason, **more}
    return {
        "id": name,
        "object": "chat.completion.chunk",
        "created": 0,
        "model": "stub",
        "choices": [choice],
    }


class App(Protocol):
    """What can be served; ``url`` is set meanwhile."""

    app: FastAPI
    url: str


Served = TypeVar("Served", bound=App)


@contextmanager
def running(stub: Served) -> Iterator[Served]:
    """Serve it from a thread."""
    server = uvicorn.Server(
        uvicorn.Config(stub.app, log_level="warning", timeout_graceful_shutdown=1)
    )
    sock = socket.socket()
    sock.bind(("127.0.0.1", 0))
    stub.url = f"http://127.0.0.1:{sock.getsockname()[1]}/v1"
    thread = threading.Thread(target=server.run, kwargs={"sockets": [sock]})
    thread.start()
    deadline = time.monotonic() + 20
    while not server.started and time.monotonic() < deadline:
        time.sleep(0.01)
    assert server.started
    try:
        yield stub
    finally:
        server.should_exit = True
        thread.join(20)
        sock.close()
