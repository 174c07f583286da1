"""What is answered in which state, as plain ASGI without an engine."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from server import front as front_module
from server.front import Front
from server.overload import Places
from tests.server.asgi import call, http

STATES = ("starting", "ready", "restarting", "draining", "failed")


def front_in(state: str, inner: Any = None, running: int = 4, waiting: int = 0) -> Front:
    front = Front(Places(running, waiting), most_body=1000, most_fields=20)
    front.inner = inner
    if state not in ("starting", "ready"):
        front.change("ready")
    front.change(state)
    return front


async def inside(scope: dict[str, Any], receive: Any, send: Any) -> None:
    while (await receive()).get("more_body", False):
        pass
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b"inside"})


def ask(front: Front, *arguments: Any, **headers: str) -> tuple[int, dict[bytes, bytes], bytes]:
    start, *rest = asyncio.run(call(front, http(*arguments, **headers)))
    return start["status"], dict(start["headers"]), b"".join(m["body"] for m in rest)


@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("has_inner", [False, True])
def test_the_probes_tell_the_truth_in_every_state_and_need_nothing(state, has_inner):
    front = front_in(state, inside if has_inner else None)
    live, live_headers, _ = ask(front, "/health")
    ready, ready_headers, body = ask(front, "/ready")
    assert live == (503 if state == "failed" else 200)
    assert ready == (200 if state == "ready" else 503)
    assert (b"retry-after" in ready_headers) == (ready == 503)
    assert (b"retry-after" in live_headers) == (live == 503)
    assert json.loads(body) == {"status": state}


@pytest.mark.parametrize("state", [s for s in STATES if s != "ready"])
def test_a_request_that_cannot_be_served_is_told_why_and_when_to_come_back(state):
    status, headers, body = ask(front_in(state, inside), "/v1/completions", "POST")
    assert status == 503
    assert 1 <= int(headers[b"retry-after"]) <= 60
    error = json.loads(body)["error"]
    assert error["code"] == state
    assert error["type"] == "service_unavailable"
    assert error["message"]
    assert (b"connection" in headers) == (state in ("draining", "failed"))


def test_figures_are_there_while_the_engine_is_not():
    for state in ("restarting", "draining"):
        front = front_in(state, inside)
        assert ask(front, "/metrics")[0] == 200
        assert ask(front, "/v1/paceline/status")[0] == 200
        assert ask(front, "/v1/paceline/policy", "POST")[0] == 503
        assert ask(front, "/v1/chat/completions", "GET")[0] == 503
    assert ask(front_in("starting"), "/metrics")[0] == 503


def test_a_purge_is_ordered_while_the_engine_is_not_there():
    path = "/v1/paceline/tenants/a/traces"
    for state in ("restarting", "draining"):
        front = front_in(state, inside)
        assert ask(front, path, "DELETE")[0] == 200
        assert ask(front, path, "POST")[0] == 503
        assert ask(front, "/v1/responses/1", "DELETE")[0] == 503
    assert ask(front_in("starting"), path, "DELETE")[0] == 503


def test_an_engine_that_has_just_died_is_not_ready_before_anybody_has_noticed():
    front = front_in("ready", inside)
    assert ask(front, "/v1/completions", "POST")[0] == 200
    front.engine_died = lambda: True
    assert ask(front, "/ready")[0] == 503
    assert ask(front, "/v1/completions", "POST")[0] == 503


def test_an_engine_that_has_just_died_after_a_long_life_is_live_and_says_when_to_come_back(
    monkeypatch,
):
    clock = [0.0]
    monkeypatch.setattr(front_module.time, "monotonic", lambda: clock[0])
    front = front_in("starting", inside)
    clock[0] = 20.0
    front.change("ready")
    clock[0] += 2 * front_module.START_DEADLINE
    front.engine_died = lambda: True
    assert ask(front, "/health")[0] == 200
    assert ask(front, "/ready")[1][b"retry-after"] == b"20"


def test_a_start_that_takes_for_ever_is_not_live(monkeypatch):
    monkeypatch.setattr(front_module, "START_DEADLINE", -1.0)
    assert ask(front_in("starting"), "/health")[0] == 503
    assert ask(front_in("restarting"), "/health")[0] == 503
    assert ask(front_in("ready"), "/health")[0] == 200


@given(st.lists(st.sampled_from(STATES), max_size=12))
def test_a_server_that_ends_is_never_ready_again(changes):
    front, ending = front_in("starting"), False
    for state in changes:
        front.change(state)
        ending = ending or state in ("draining", "failed")
        assert not (ending and front.ready)


def test_a_full_house_refuses_with_429_and_places_come_back():
    front = front_in("ready", None, running=2, waiting=1)
    release = asyncio.Event()

    async def slow(scope: Any, receive: Any, send: Any) -> None:
        await release.wait()
        await inside(scope, receive, send)

    async def run() -> list[int]:
        front.inner = slow
        first = [asyncio.create_task(call(front, http("/v1/x", "POST"))) for _ in range(5)]
        await asyncio.sleep(0.01)
        release.set()
        statuses = [(await task)[0]["status"] for task in first]
        after = (await call(front, http("/v1/x", "POST")))[0]["status"]
        return [*statuses, after]

    assert asyncio.run(run()) == [200, 200, 200, 429, 429, 200]
    assert front.places.taken == 0
    assert front.refused == {"overloaded": 2}


@pytest.mark.parametrize("error", [RuntimeError, asyncio.CancelledError])
def test_a_place_comes_back_from_a_request_that_failed(error):
    async def fails(scope: Any, receive: Any, send: Any) -> None:
        raise error

    front = front_in("ready", fails)
    with pytest.raises(error):
        asyncio.run(call(front, http("/v1/x", "POST")))
    assert front.places.taken == front.running == 0


def test_reading_takes_no_place():
    front = front_in("ready", inside, running=0)
    assert ask(front, "/v1/models")[0] == 200
    assert ask(front, "/v1/paceline/drafts/rollback", "POST")[0] == 200
    assert ask(front, "/v1/completions", "POST")[0] == 429


def test_a_body_that_is_too_long_is_refused_whatever_the_app_says():
    front = front_in("ready", inside)

    async def run(body: bytes, **headers: str) -> list[dict[str, Any]]:
        return await call(front, http("/v1/x", "POST", **headers), body)

    assert asyncio.run(run(b"x" * 1000))[0]["status"] == 200
    too_long = asyncio.run(run(b"x" * 1001))
    assert [m["type"] for m in too_long] == ["http.response.start", "http.response.body"]
    assert too_long[0]["status"] == 413
    assert asyncio.run(run(b"", content_length="1001"))[0]["status"] == 413
    assert asyncio.run(run(b"", **{f"h{i}": "x" for i in range(21)}))[0]["status"] == 431


def test_an_error_of_the_app_that_believed_its_client_gone_is_no_answer():
    async def fails(scope: Any, receive: Any, send: Any) -> None:
        assert (await receive())["type"] == "http.disconnect"
        raise RuntimeError("client gone")

    sent = asyncio.run(call(front_in("ready", fails), http("/v1/x", "POST"), b"x" * 1001))
    assert sent[0]["status"] == 413


def test_requests_that_are_ended_have_a_complete_response():
    async def never(scope: Any, receive: Any, send: Any) -> None:
        await asyncio.Event().wait()

    async def stream(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"a", "more_body": True})
        await asyncio.Event().wait()

    async def run(app: Any, scope: dict[str, Any]) -> list[dict[str, Any]]:
        front = front_in("ready", app)
        task = asyncio.create_task(call(front, scope))
        await asyncio.sleep(0.01)
        assert front.running == (scope["method"] == "POST")
        front.change("draining")
        front.end_requests()
        return await task

    sent = asyncio.run(run(never, http("/v1/x", "POST")))
    assert sent[0]["status"] == 503
    assert json.loads(sent[1]["body"])["error"]["code"] == "draining"
    sent = asyncio.run(run(stream, http("/v1/paceline/feed")))
    assert [m.get("more_body") for m in sent] == [None, True, False]


def test_a_503_of_the_engine_says_when_to_come_back():
    async def dead(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 503, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    _, headers, _ = ask(front_in("ready", dead), "/v1/x", "POST")
    assert b"retry-after" in headers
