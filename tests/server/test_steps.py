"""A stream that tells, chunk by chunk, how many tokens each step of the engine emitted."""

from __future__ import annotations

import asyncio
import json
from collections import deque
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlcore.engine.frontend import RequestLedger, Ticket, current_ticket
from server.access import STATE_IDENTITY, Identity
from server.middleware import DraftAccount

VERSIONS = [{"version": 4, "steps": 2, "emitted": 5}]
ASKED = {"x_paceline_steps": "true"}
USAGE = {"choices": [], "usage": {"total_tokens": 3}}


def event(value: Any) -> bytes:
    return f"data: {json.dumps(value)}\n\n".encode()


def streamed(steps: list[int], merged: list[int], ids: list[str], **headers: str) -> list[Any]:
    """The events of a stream whose n-th chunk holds the tokens of ``merged[n]`` steps."""

    async def app(scope: dict[str, Any], receive: Any, send: Any) -> None:
        ticket = current_ticket.get()
        assert ticket is not None
        ticket.engine_ids.extend(ids)
        await send({"type": "http.response.start", "status": 200,
                    "headers": [(b"content-type", b"text/event-stream")]})  # fmt: skip
        left = deque(steps)
        for count in merged:
            emitted = [left.popleft() for _ in range(min(count, len(left)))]
            if ticket.steps is not None:
                ticket.steps.extend(emitted)
            chunk = {"choices": [{"delta": {"content": "x"}, "token_ids": [7] * sum(emitted)}]}
            await send({"type": "http.response.body", "body": event(chunk), "more_body": True})
        await send({"type": "http.response.body", "body": event(USAGE), "more_body": False})

    async def acceptance_of(ids: list[str]) -> list[dict[str, Any]]:
        return VERSIONS

    sent: list[dict[str, Any]] = []

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    scope = {
        "type": "http", "method": "POST", "path": "/", "state": {STATE_IDENTITY: Identity("default")},
        "headers": [(k.replace("_", "-").encode(), v.encode()) for k, v in headers.items()],
    }  # fmt: skip
    live = SimpleNamespace(live=4)
    asyncio.run(DraftAccount(app, live, live, acceptance_of)(scope, None, send))
    body = b"".join(message["body"] for message in sent[1:])
    return [json.loads(part.removeprefix(b"data: ")) for part in body.split(b"\n\n") if part]


@given(st.lists(st.integers(1, 5), max_size=12), st.integers(1, 4))
def test_a_chunk_says_its_steps_however_many_are_merged_into_it(steps, at_once):
    merged = [at_once] * -(-len(steps) // at_once)
    *chunks, usage = streamed(steps, merged, ["e"], **ASKED)
    told = [chunk["paceline"]["steps"] for chunk in chunks]
    assert [sum(t) for t in told] == [len(c["choices"][0]["token_ids"]) for c in chunks]
    assert [step for t in told for step in t] == steps
    assert usage["usage"]["paceline"] == {"versions": VERSIONS}


@pytest.mark.parametrize(
    ("ids", "headers"), [(["e"], {}), (["e"], {"x_paceline_usage": "true"}), (["e", "f"], ASKED)]
)
def test_nothing_is_told_unasked_nor_of_several_choices(ids, headers):
    chunk, _ = streamed([2], [1], ids, **headers)
    assert "paceline" not in chunk


def test_a_stop_string_cuts_the_last_step():
    ticket = Ticket(steps=deque([2, 4]))
    assert ticket.take_steps(3) == [2, 1]
    assert ticket.take_steps(1) == []


def test_the_ledger_notes_what_each_step_emitted_for_whoever_asked(monkeypatch):
    seen = []
    monkeypatch.setattr(
        RequestLedger.__mro__[1], "process_outputs", lambda self, outputs, when: seen.append(when)
    )
    ledger = object.__new__(RequestLedger)
    asking, other = Ticket(steps=deque()), Ticket()
    ledger._tickets = {"a": asking, "b": other}
    outputs = [
        SimpleNamespace(request_id=name, new_token_ids=ids)
        for name, ids in (("a", [1, 2, 3]), ("b", [1]), ("gone", [1]), ("a", []), ("a", [4]))
    ]
    ledger.process_outputs(outputs, 1.0)
    assert asking.steps == deque([3, 1])
    assert other.steps is None
    assert seen == [1.0]
