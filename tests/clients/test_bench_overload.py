"""The overload benchmark: its figures, and a whole run against the server's own front."""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path
from typing import Any

import pytest
from fastapi import FastAPI, Request
from fastapi.responses import StreamingResponse

from clients.bench import overload
from clients.bench.overload_figures import Event, Reading, figures, memory_of
from server.front import Front
from server.overload import Places
from tests.clients.stub import chunk, running

REFUSAL = json.dumps(
    {"error": {"message": "busy", "type": "rate_limit_error", "code": "overloaded"}}
)


def event(started: float, seconds: float, status: int = 200, **more: Any) -> Event:
    complete = {
        "complete": status == 200,
        "first": started + seconds / 2 if status == 200 else None,
    }
    return Event(started=started, ended=started + seconds, status=status, **complete | more)


def of(*events: Event, seconds: float = 10.0, capacity: float = 1.0) -> Any:
    return figures(events, [], begun=100.0, seconds=seconds, capacity=capacity)


def test_offered_counts_every_request_and_served_only_what_ended_in_time() -> None:
    found = of(event(100, 4), event(101, 20), event(102, 0.1, 429, retry_after="3", body=REFUSAL))
    assert found.offered_per_s == pytest.approx(0.3)
    assert found.served_per_s == pytest.approx(0.1)
    assert found.served == 2
    assert found.statuses == {"200": 2, "429": 1}
    assert found.latency_s.max == pytest.approx(20)
    assert found.first_token_s.count == 2


@pytest.mark.parametrize(
    "wrong",
    [
        {"retry_after": None, "body": REFUSAL},
        {"retry_after": "0", "body": REFUSAL},
        {"retry_after": "soon", "body": REFUSAL},
        {"retry_after": "3", "body": "busy"},
        {"retry_after": "3", "body": '{"error": {"message": ""}}'},
    ],
)
def test_a_refusal_without_a_time_or_an_error_is_wrong(wrong: dict[str, Any]) -> None:
    found = of(event(100, 0.1, 429, **wrong), event(100, 0.1, 429, retry_after="2", body=REFUSAL))
    assert (found.refused_rightly, found.refused_wrongly) == (1, 1)
    assert found.retry_after_s.p50 == 2


def test_a_stream_without_its_end_and_no_answer_are_told() -> None:
    found = of(event(100, 1, complete=False), event(100, 1, 0), event(100, 1, 500))
    assert found.broken == 1
    assert len(found.others) == 3
    assert found.statuses == {"200": 1, "500": 1, "no answer": 1}


def test_memorys_growth_is_that_under_load() -> None:
    sizes = [10, 50, 60, 61, 70, 20]  # the last one after the load
    readings = [
        Reading(at=20.0 * i, parts={"engine": m - i, "learner": i}, health=200, health_s=0)
        for i, m in enumerate(sizes)
    ]
    found = memory_of(readings, 100.0)
    assert (found.start, found.peak, found.end) == (10, 70, 20)
    assert found.late_growth == 70 - 60
    assert found.late_growth_by_part == {"engine": 66 - 58, "learner": 4 - 2}


class Slow:
    """Two requests at a time, 0.4 s each, behind the front with places for two and two."""

    def __init__(self) -> None:
        inner = FastAPI()
        inner.get("/v1/models")(self.models)
        inner.post("/v1/chat/completions", response_model=None)(self.chat)
        self.app = Front(Places(2, 2), most_body=10**6, most_fields=100)
        self.app.inner = inner
        self.app.change("ready")
        self.url = ""
        self._places = asyncio.Semaphore(2)

    async def models(self) -> dict[str, Any]:
        return {
            "object": "list",
            "data": [{"id": "slow", "object": "model", "created": 0, "owned_by": ""}],
        }

    async def chat(self, request: Request) -> StreamingResponse:
        return StreamingResponse(self.stream(), media_type="text/event-stream")

    async def stream(self) -> Any:
        async with self._places:
            for i in range(8):
                await asyncio.sleep(0.05)
                yield f"data: {json.dumps(chunk({'content': str(i)}), separators=(',', ':'))}\n\n"
        usage = {"prompt_tokens": 3, "completion_tokens": 8, "total_tokens": 11}
        yield f"data: {json.dumps(chunk({}, finish_reason='length'))}\n\n"
        yield f"data: {json.dumps({**chunk({}), 'choices': [], 'usage': usage})}\n\n"
        yield "data: [DONE]\n\n"


class Here:
    """In a server process's place: the test's own process."""

    alive = True
    pid = os.getpid()

    def __init__(self, url: str) -> None:
        self.openai_url, self.url = url, url.removesuffix("/v1")

    def children(self) -> list[Any]:
        return []


@pytest.mark.slow
def test_a_run_sees_the_capacity_the_refusals_and_the_recovery(tmp_path: Path) -> None:
    args = overload.parse(
        ["--seconds", "8", "--capacity-seconds", "3", "--running", "2", "--deadline", "20"]
    )
    with running(Slow()) as slow:
        report = asyncio.run(overload.measure(args, Here(slow.url), tmp_path))  # type: ignore[arg-type]
    found = report["figures"]
    assert report["capacity_per_s"] < 6
    assert found.offered_over_capacity > 2
    assert found.busiest_second < 2.5 * found.offered_per_s  # no waves
    assert 0.2 < found.served_over_capacity < 2
    assert found.refused_rightly > found.served > 10
    assert (found.refused_wrongly, found.broken, found.health_failures) == (0, 0, 0)
    assert found.latency_s.max < args.deadline
    assert found.others == []
    assert report["recovery_s"] is not None
    assert overload.fit(report)
