"""The load generator over real sockets, against a small server that misbehaves on request."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest

from clients.load import LoadOptions, LoadResult, RequestRecord, make_client, run_load, served_model
from clients.workload import Prompt
from rlcore.records.acceptance import AcceptanceCount
from tests.clients.stub import PAUSE, Stub, running


@pytest.fixture
def stub() -> Iterator[Stub]:
    with running(Stub()) as stub:
        yield stub


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
    assert "x-paceline-tenant" not in headers


def test_requests_are_sent_in_their_tenants_name(stub: Stub) -> None:
    assert one(stub, "go one", tenant="team-a").error is None
    assert stub.headers[0]["x-paceline-tenant"] == "team-a"


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
