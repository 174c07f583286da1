"""The load generator over real sockets, against a small server that misbehaves on request."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
from collections.abc import AsyncIterator, Iterator
from itertools import pairwise
from typing import Any

import pytest
import uvicorn
from fastapi import FastAPI, HTTPException, Request
from fastapi.responses import StreamingResponse

from clients.load import LoadOptions, LoadResult, RequestRecord, make_client, run_load, served_model
from clients.workload import Prompt
from rlcore.records import AcceptanceCount

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


@pytest.fixture
def stub() -> Iterator[Stub]:
    stub = Stub()
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
    yield stub
    server.should_exit = True
    thread.join(20)
    sock.close()


def load(stub: Stub, *texts: str, more: dict[str, Any] | None = None, **options: Any) -> LoadResult:
    prompts = [Prompt(str(i), tuple(text.split("|"))) for i, text in enumerate(texts)]

    async def run() -> LoadResult:
        async with make_client(stub.url) as client:
            return await run_load(
                client, prompts, LoadOptions(model="stub", **options), **(more or {})
            )

    return asyncio.run(run())


def one(stub: Stub, text: str, **options: Any) -> RequestRecord:
    (record,) = load(stub, text, **options).records
    return record


def test_a_good_stream_is_written_down_in_full(stub: Stub) -> None:
    record = one(stub, "go one two three", max_tokens=7, temperature=0.5, top_p=0.9, seed=11)
    assert record.error is None
    assert record.text == "onetwothree"
    assert record.token_ids == [[0, 0], [1, 1], [2, 2]]
    assert (record.prompt_tokens, record.output_tokens, record.finish_reason) == (3, 6, "length")
    assert (record.id, record.admitted_version, record.restarted) == ("a", 4, False)
    assert record.versions == [AcceptanceCount(4, 2, 1, 5, [2, 2], [2, 1])]
    assert len(record.chunk_times) == 3  # neither the opening chunk, nor the finish, nor the usage
    assert record.started < record.chunk_times[0] == record.first_token
    assert record.chunk_times == sorted(record.chunk_times)
    assert record.chunk_times[-1] <= record.ended
    (body,), (headers,) = stub.bodies, stub.headers
    sent = {
        key: body[key] for key in ("model", "max_tokens", "temperature", "top_p", "seed", "stream")
    }
    assert sent == {
        "model": "stub",
        "max_tokens": 7,
        "temperature": 0.5,
        "top_p": 0.9,
        "seed": 11,
        "stream": True,
    }
    assert body["stream_options"] == {"include_usage": True}
    assert headers["x-paceline-usage"] == "true"


def test_a_pause_of_the_server_shows_as_a_gap(stub: Stub) -> None:
    times = one(stub, "pause a b c d").chunk_times
    between = [after - before for before, after in pairwise(times)]
    assert between.index(max(between)) == 1
    assert max(between) >= PAUSE * 0.8


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("refuse", "InternalServerError"),
        ("break a b", "engine died"),
        ("cut a b", "without a finish reason"),
        ("unpaid a b", "without its usage"),
        ("badcount a", "ValidationError"),
    ],
)
def test_what_goes_wrong_stands_in_the_record(stub: Stub, text: str, said: str) -> None:
    record = one(stub, text)
    assert record.error is not None
    assert said in record.error
    assert len(stub.bodies) == 1  # nothing is tried again


def test_nobody_listening_is_recorded() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # bound, but not listening
        nowhere = Stub()
        nowhere.url = f"http://127.0.0.1:{taken.getsockname()[1]}/v1"
        record = one(nowhere, "go a")
    assert record.error is not None
    assert "APIConnectionError" in record.error


@pytest.mark.parametrize("text", ["other a b c", "anew a b c"])
def test_a_stream_that_begins_anew_is_noticed(stub: Stub, text: str) -> None:
    assert one(stub, text).restarted


def test_the_deadline_ends_a_hanging_request_and_keeps_what_came(stub: Stub) -> None:
    begun = time.monotonic()
    record = one(stub, "hang a b", deadline_s=0.5)
    assert time.monotonic() - begun < 10
    assert record.error == "deadline: not ended within 0.5 s"
    assert record.text == "a"


def test_each_prompt_is_sent_once_at_the_given_concurrency(stub: Stub) -> None:
    texts = [f"go {i} a b c d e" for i in range(12)]
    result = load(stub, *texts, concurrency=3, seed=100)
    assert result.ended_by == "prompts"
    assert sorted(body["messages"][0]["content"] for body in stub.bodies) == sorted(texts)
    assert sorted(body["seed"] for body in stub.bodies) == list(range(100, 112))
    assert stub.most_running == 3
    assert [r.ended for r in result.records] == sorted(r.ended for r in result.records)
    assert result.started <= result.records[0].started
    assert result.ended >= result.records[-1].ended


def test_later_turns_carry_the_answers(stub: Stub) -> None:
    result = load(stub, "go a b|go c", multi_turn=True)
    assert [r.turn for r in result.records] == [0, 1]
    assert [m["content"] for m in stub.bodies[1]["messages"]] == ["go a b", "ab", "go c"]
    assert load(stub, "go a b|go c").records[-1].turn == 0
    assert len(stub.bodies) == 3


def test_a_dead_server_does_not_eat_all_prompts(stub: Stub) -> None:
    result = load(stub, *["refuse"] * 30, concurrency=2, errors_in_a_row=4)
    assert result.ended_by == "errors"
    assert 4 <= len(result.records) <= 5


def test_time_and_stop_end_the_sending_but_not_the_streams(stub: Stub) -> None:
    texts = [f"go {i} a b c" for i in range(200)]
    timed = load(stub, *texts, more={"until": 0.3})
    assert timed.ended_by == "time"
    assert 0 < len(timed.records) < 200
    assert all(r.error is None and r.started < 0.3 for r in timed.records)
    stop = asyncio.Event()
    stopped = load(
        stub, *texts, concurrency=1, more={"stop": stop, "on_record": lambda record: stop.set()}
    )
    assert stopped.ended_by == "stop"
    assert len(stopped.records) == 1


def test_the_served_model_is_asked_for(stub: Stub) -> None:
    async def ask() -> str:
        async with make_client(stub.url) as client:
            return await served_model(client)

    assert asyncio.run(ask()) == "stub"
