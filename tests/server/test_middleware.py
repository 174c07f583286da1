"""The ticket, the version header and the usage account, as plain ASGI without an engine."""

from __future__ import annotations

import asyncio
import itertools
import json
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlcore.engine.frontend import Ticket, current_ticket
from server.access import STATE_IDENTITY, STATE_LEASE, Identity
from server.keys import TenantRules
from server.middleware import DraftAccount
from server.quotas import Lease, Quotas
from tests.server.asgi import call

VERSIONS = [{"version": 4, "steps": 2, "emitted": 5}]


def http(path: str = "/", method: str = "GET", **headers: str) -> dict[str, Any]:
    return {
        "type": "http", "method": method, "path": path, "raw_path": path.encode(),
        "query_string": b"", "http_version": "1.1", "scheme": "http", "root_path": "",
        "headers": [(k.replace("_", "-").encode(), v.encode()) for k, v in headers.items()],
        "state": {STATE_IDENTITY: Identity("team-a")},
    }  # fmt: skip


# --- the account ---

DRAFTS, POLICY = SimpleNamespace(live=4), SimpleNamespace(live=9)


def ended(request: str, choice: int, emitted: int, *starts: tuple[str, int]) -> Any:
    """The state of a choice that has ended, as vLLM keeps it."""
    return SimpleNamespace(
        external_req_id=request, request_index=choice, weight_version_starts=list(starts),
        detokenizer=SimpleNamespace(num_output_tokens=lambda: emitted),
    )  # fmt: skip


CHOICES = [
    ended("cmpl-1-10", 1, 5, ("8", 0), ("9", 4)),
    ended("cmpl-1-2", 0, 3, ("9", 0)),
    ended("cmpl-1-10", 0, 4, ("8", 0), ("9", 4)),
]
POLICIES = [[[0, 9]], [[0, 8]], [[0, 8], [4, 9]]]
"""Of those, in the response's order; a version that sampled none of the tokens left is not named."""


def account(kind: str, parts: list[bytes], **headers: str) -> list[dict[str, Any]]:
    """What a client gets of an app that sends its body in these parts."""
    asked: list[list[str]] = []

    async def app(scope: dict[str, Any], receive: Any, send: Any) -> None:
        ticket = current_ticket.get()
        assert ticket is not None
        ticket.engine_ids.append("engine-1")
        for choice in CHOICES:
            ticket.note_policies(choice)
        length = str(sum(map(len, parts))).encode()
        start = [(b"content-type", kind.encode())]
        if not kind.startswith("text/event-stream"):
            start.append((b"content-length", length))
        await send({"type": "http.response.start", "status": 200, "headers": start})
        for i, part in enumerate(parts):
            more = i + 1 < len(parts)
            await send({"type": "http.response.body", "body": part, "more_body": more})

    async def acceptance_of(ids: list[str]) -> list[dict[str, Any]]:
        asked.append(ids)
        return VERSIONS

    sent = asyncio.run(call(DraftAccount(app, DRAFTS, POLICY, acceptance_of), http(**headers)))
    assert all(ids == ["engine-1"] for ids in asked)
    return sent


@pytest.mark.parametrize("rules", ["opt-out", "opt-in", "never"])
@pytest.mark.parametrize("excluded", [False, True])
@pytest.mark.parametrize(
    ("wish", "meant"), [(None, None), ("false", False), ("0", False), ("TRUE", True), ("1", True)]
)
def test_the_tenant_the_key_and_the_request_decide_together_what_is_learned(
    rules, excluded, wish, meant
):
    expected = {"opt-out": meant is not False, "opt-in": meant is True, "never": False}[rules]
    headers = {} if wish is None else {"x-paceline-learn": wish}
    identity = Identity("team-a", rules=TenantRules(learn=rules), never_learn=excluded)
    ticket = ticket_of(http(**headers) | {"state": {STATE_IDENTITY: identity}})
    assert (ticket.tenant, ticket.learn) == ("team-a", expected and not excluded)


def ticket_of(scope: dict[str, Any]) -> Ticket:
    seen: list[Ticket] = []

    async def app(scope: dict[str, Any], receive: Any, send: Any) -> None:
        found = current_ticket.get()
        assert found is not None
        seen.append(found)

    asyncio.run(call(DraftAccount(app, DRAFTS, POLICY, None), scope))
    return seen[0]


def test_a_websocket_has_a_ticket_too():
    identity = Identity("team-a", rules=TenantRules(learn="never"))
    scope = {"type": "websocket", "path": "/v1/realtime", "headers": []}
    ticket = ticket_of(scope | {"state": {STATE_IDENTITY: identity}})
    assert (ticket.tenant, ticket.learn) == ("team-a", False)


def test_what_the_engine_counts_is_charged_to_the_lease():
    rules = TenantRules(tokens_per_minute=100)
    lease = Quotas().admit("team-a", rules, 10, 0.0)
    assert isinstance(lease, Lease)
    state = {STATE_IDENTITY: Identity("team-a", rules=rules), STATE_LEASE: lease}
    ticket = ticket_of(http() | {"state": state})
    assert ticket.charge is not None
    ticket.charge(30)
    assert lease.account.tokens is not None
    assert lease.account.tokens.balance == 70


def test_priorities_are_in_force_with_a_keys_file_only():
    rules = TenantRules(priority=-3)
    for ranked, priority in ((True, -3), (False, None)):
        identity = Identity("team-a", rules=rules, ranked=ranked)
        assert ticket_of(http() | {"state": {STATE_IDENTITY: identity}}).priority == priority


@pytest.mark.parametrize(
    "headers",
    [{"x-paceline-learn": "no!"}, {"x-paceline-learn": ""}, {"x-paceline-learn": "false, true"}],
)
def test_a_header_that_cannot_be_meant_is_refused_before_the_app_sees_it(headers):
    async def app(scope: dict[str, Any], receive: Any, send: Any) -> None:
        raise AssertionError("the app was called")

    sent = asyncio.run(call(DraftAccount(app, DRAFTS, POLICY, None), http(**headers)))
    assert sent[0]["status"] == 400
    assert b"x-paceline-" in sent[1]["body"]


def body_of(sent: list[dict[str, Any]]) -> bytes:
    assert sent[0]["type"] == "http.response.start"
    assert [m.get("more_body", False) for m in sent[1:]] == [True] * (len(sent) - 2) + [False]
    return b"".join(m["body"] for m in sent[1:])


def cut(content: bytes, places: list[int]) -> list[bytes]:
    edges = [0, *sorted(p % (len(content) + 1) for p in places), len(content)]
    return [content[a:b] for a, b in itertools.pairwise(edges)]


def event(value: Any, name: str | None = None) -> bytes:
    head = f"event: {name}\n" if name else ""
    return f"{head}data: {json.dumps(value, ensure_ascii=False)}\n\n".encode()


CHUNKS = [
    {"object": "chat.completion.chunk", "choices": [{"delta": {"content": 'Grüße "usage" 🙂'}}],
     "usage": {"total_tokens": 1}},
    {"object": "text_completion", "choices": [{"text": "\n\n"}], "usage": {"total_tokens": 2}},
    {"object": "chat.completion.chunk", "choices": [{"delta": {}}], "usage": None},
]  # fmt: skip
CHAT = {"object": "chat.completion.chunk", "choices": [], "usage": {"total_tokens": 3}}
RESPONSE = {
    "type": "response.completed",
    "response": {"id": "r", "text": '\ndata: {"usage"', "usage": {"total_tokens": 3}},
}
JSONS = [
    {"object": "chat.completion", "choices": [{"message": {"content": "Grüße 🙂"}}],
     "usage": {"total_tokens": 3}},
    {"object": "text_completion", "choices": [{"text": "x"}], "usage": {"total_tokens": 3}},
    {"object": "response", "output": [], "usage": {"total_tokens": 3}},
]  # fmt: skip
places = st.lists(st.integers(0, 5000), max_size=12)
ASKED = {"x_paceline_usage": "true"}


@settings(max_examples=60)
@given(st.sampled_from(JSONS), places)
def test_a_json_body_gains_the_account_wherever_it_is_cut(value, at):
    content = json.dumps(value, ensure_ascii=False).encode()
    sent = account("application/json", cut(content, at), **ASKED)
    body = body_of(sent)
    expected = value | {"usage": value["usage"] | {"paceline": {"versions": VERSIONS}}}
    assert json.loads(body) == expected
    assert dict(sent[0]["headers"])[b"content-length"] == str(len(body)).encode()
    assert dict(sent[0]["headers"])[b"x-paceline-draft-version"] == b"4"


@settings(max_examples=100)
@given(places, st.booleans())
def test_only_the_last_usage_of_an_event_stream_gains_it_wherever_it_is_cut(at, responses):
    if responses:
        created = {"type": "response.created", "response": {"id": "r", "usage": None}}
        head = event(created, "response.created")
        last, name = RESPONSE, "response.completed"
        usage = {"total_tokens": 3, "paceline": {"versions": VERSIONS}}
        expected = RESPONSE | {"response": RESPONSE["response"] | {"usage": usage}}
        tail = b""
    else:
        head = b"".join(event(chunk) for chunk in CHUNKS)
        last, name = CHAT, None
        expected = CHAT | {"usage": {"total_tokens": 3, "paceline": {"versions": VERSIONS}}}
        tail = b"data: [DONE]\n\n"
    content = head + event(last, name) + tail
    body = body_of(account("text/event-stream; charset=utf-8", cut(content, at), **ASKED))
    assert body.startswith(head)
    assert body.endswith(tail)
    written = body[len(head) : len(body) - len(tail)]
    prefix = f"event: {name}\ndata: " if name else "data: "
    assert written.startswith(prefix.encode())
    assert written.endswith(b"\n\n")
    assert json.loads(written[len(prefix) :]) == expected


@settings(max_examples=60)
@given(st.binary(max_size=80), places, st.sampled_from(["application/json", "text/event-stream"]))
def test_a_body_without_usage_comes_through_byte_for_byte(content, at, kind):
    assert body_of(account(kind, cut(content, at), **ASKED)) == content


@settings(max_examples=40)
@given(places, st.sampled_from(["application/json", "text/event-stream"]))
def test_who_does_not_ask_gets_the_bytes_and_their_cuts_as_they_were(at, kind):
    content = event(CHAT) if kind == "text/event-stream" else json.dumps(JSONS[0]).encode()
    parts = cut(content, at)
    sent = account(kind, parts)
    assert [m["body"] for m in sent[1:]] == parts
    assert dict(sent[0]["headers"])[b"x-paceline-draft-version"] == b"4"


@pytest.mark.parametrize("usage", [False, True])
def test_each_choice_is_told_which_policy_sampled_which_of_its_tokens(usage):
    """Choices end in any order; the engine is not asked for it."""
    headers = {"x_paceline_policy_versions": "1"} | (ASKED if usage else {})
    sent = account("application/json", [json.dumps(JSONS[1]).encode()], **headers)
    expected = {"policy_versions": POLICIES} | ({"versions": VERSIONS} if usage else {})
    assert json.loads(body_of(sent))["usage"]["paceline"] == expected
    assert dict(sent[0]["headers"])[b"x-paceline-policy-version"] == b"9"


def test_another_kind_of_body_is_not_held_back():
    sent = account("text/plain", [b'{"usage": {}}', b"more"], **ASKED)
    assert [m["body"] for m in sent[1:]] == [b'{"usage": {}}', b"more"]


def test_complete_events_are_not_held_back_for_the_next_ones():
    sent = account("text/event-stream", [event(CHUNKS[0]), event(CHAT)], **ASKED)
    assert sent[1]["body"] == event(CHUNKS[0])
