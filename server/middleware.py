"""What wraps every request that was let in: its ticket, the draft version, the usage.

Plain ASGI, so that streams pass through chunk by chunk and the ticket's context reaches the engine.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Any

from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from rlcore.engine.frontend import Ticket, current_ticket
from server.access import STATE_IDENTITY, Identity, lease_of
from server.drafts import Drafts
from server.policy import Policy

VERSION_HEADER = b"x-paceline-draft-version"
POLICY_HEADER = b"x-paceline-policy-version"
USAGE_HEADER = b"x-paceline-usage"
STEPS_HEADER = b"x-paceline-steps"
POLICIES_HEADER = b"x-paceline-policy-versions"
LEARN_HEADER = b"x-paceline-learn"
TRUE = (b"1", b"true")
FALSE = (b"0", b"false")

AcceptanceOf = Callable[[list[str]], Awaitable[list[dict[str, Any]]]]
"""Engine request ids -> acceptance counts by draft version, as plain values."""


class DraftAccount:
    """Gives each request a ticket, says which versions served it, and adds them to the usage.

    The headers carry the versions at admission. With ``x-paceline-usage: true`` the final usage also
    lists every version that drafted for the request, with its acceptance counts; with
    ``x-paceline-policy-versions: true`` it lists, for each choice, from which output token on each
    version of the target sampled. ``x-paceline-steps: true`` has every chunk of a stream with one choice
    and ``return_token_ids`` say how many of its tokens each step emitted, and implies the usage. With
    ``x-paceline-learn: false`` nothing of the request is learned from; ``true`` asks for it where the
    tenant's rules leave that to each request.
    """

    def __init__(
        self, app: ASGIApp, drafts: Drafts, policy: Policy, acceptance_of: AcceptanceOf
    ) -> None:
        self.app = app
        self._drafts = drafts
        self._policy = policy
        self._acceptance_of = acceptance_of

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket"):
            await self.app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        try:
            ticket = _ticket(scope, headers)
        except ValueError as error:
            if scope["type"] == "websocket":
                await send({"type": "websocket.close", "code": 1008})
            else:
                await _bad_request(str(error))(scope, receive, send)
            return
        current_ticket.set(ticket)
        if scope["type"] == "websocket":
            await self.app(scope, receive, send)
            return
        versions = [
            (VERSION_HEADER, str(self._drafts.live).encode()),
            (POLICY_HEADER, str(self._policy.live).encode()),
        ]
        if headers.get(STEPS_HEADER, b"").lower() in TRUE:
            ticket.steps = deque()
        usage = ticket.steps is not None or headers.get(USAGE_HEADER, b"").lower() in TRUE
        policies = headers.get(POLICIES_HEADER, b"").lower() in TRUE
        account = None
        if usage or policies:
            account = _UsageWriter(send, ticket, self._acceptance_of if usage else None, policies)

        async def send_on(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", []), *versions]
            await (account(message) if account else send(message))

        await self.app(scope, receive, send_on)


def _ticket(scope: Scope, headers: dict[bytes, bytes]) -> Ticket:
    """Raises ValueError, so that a misspelt opt-out is not taken for consent."""
    identity: Identity = scope["state"][STATE_IDENTITY]
    wish = headers.get(LEARN_HEADER)
    if wish is not None and wish.lower() not in TRUE + FALSE:
        raise ValueError("x-paceline-learn takes true or false")
    lease = lease_of(scope)
    return Ticket(
        tenant=identity.tenant,
        learn=identity.learns(None if wish is None else wish.lower() in TRUE),
        priority=identity.rules.priority if identity.ranked else None,
        charge=None if lease is None else lease.charge,
        came=identity.came,
    )


def _bad_request(message: str) -> JSONResponse:
    error = {"message": message, "type": "invalid_request_error", "code": "invalid_header"}
    return JSONResponse({"error": error}, status_code=400)


class _UsageWriter:
    """Adds ``usage.paceline`` to a JSON body, or to the usage event of an event stream; to the other
    events, their steps if the ticket has them."""

    def __init__(
        self, send: Send, ticket: Ticket, acceptance_of: AcceptanceOf | None, policies: bool
    ) -> None:
        self._send = send
        self._ticket = ticket
        self._acceptance_of = acceptance_of
        self._policies = policies
        self._start: Message | None = None
        self._stream = False
        self._buffer = b""

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            kind = dict(message["headers"]).get(b"content-type", b"")
            self._stream = kind.startswith(b"text/event-stream")
            if self._stream or not kind.startswith(b"application/json"):
                await self._send(message)
            else:
                self._start = message  # its content-length is known only with the body
            return
        if message["type"] != "http.response.body" or not (self._stream or self._start):
            await self._send(message)
            return
        self._buffer += message.get("body", b"")
        more = message.get("more_body", False)
        if self._stream:
            events, separator, rest = self._buffer.rpartition(b"\n\n")
            done = events + separator if more else self._buffer
            self._buffer = rest if more else b""
            body = b"\n\n".join([await self._event(e) for e in done.split(b"\n\n")])
            await self._send({**message, "body": body})
        elif not more:
            await self._send_json(self._buffer)

    async def _event(self, event: bytes) -> bytes:
        """A stream's running usage stays as it is; the last one, without choices, gets the account."""
        head, data, content = event.partition(b"data: {")
        if not data or (head and not head.endswith(b"\n")):
            return event
        if self._ticket.steps is not None and b'"token_ids"' in content:
            return head + b"data: " + self._with_steps(b"{" + content)
        if b'"usage"' not in content:
            return event
        return head + b"data: " + await self._with_usage(b"{" + content, running=True)

    def _with_steps(self, content: bytes) -> bytes:
        try:
            value = json.loads(content)
        except (ValueError, RecursionError):
            return content
        choices = value.get("choices")
        if not isinstance(choices, list) or len(choices) != 1 or len(self._ticket.engine_ids) != 1:
            return content
        token_ids = choices[0].get("token_ids") if isinstance(choices[0], dict) else None
        if not isinstance(token_ids, list):
            return content
        value["paceline"] = {"steps": self._ticket.take_steps(len(token_ids))}
        return _compact(value)

    async def _send_json(self, content: bytes) -> None:
        assert self._start is not None
        body = await self._with_usage(content)
        headers = [(k, v) for k, v in self._start["headers"] if k.lower() != b"content-length"]
        headers.append((b"content-length", str(len(body)).encode()))
        await self._send({**self._start, "headers": headers})
        await self._send({"type": "http.response.body", "body": body})

    async def _with_usage(self, content: bytes, running: bool = False) -> bytes:
        try:
            value = json.loads(content)
        except (ValueError, RecursionError):
            return content
        holder = value.get("response", value) if isinstance(value, dict) else None
        if not isinstance(holder, dict) or not isinstance(holder.get("usage"), dict):
            return content
        if running and holder.get("choices"):
            return content
        account: dict[str, Any] = {}
        if self._acceptance_of is not None:
            account["versions"] = await self._acceptance_of(self._ticket.engine_ids)
        if self._ticket.adapter:
            account["adapter"] = self._ticket.adapter
        if self._policies:
            account["policy_versions"] = self._ticket.policy_versions
        holder["usage"]["paceline"] = account
        return _compact(value)


def _compact(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False).encode()
