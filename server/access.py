"""Who asks: the key of every request, the tenant it belongs to, and what its role may reach.

Plain ASGI, around everything but the front's liveness routes. A request that passes carries an
``Identity`` in ``scope["state"]``, and a ``Lease`` on its tenant's quota where there is one.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import json
import re
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from server.keyring import KeyRing
from server.keys import DEFAULT_TENANT, TENANT_PATTERN, KeyEntry, Role, TenantRules
from server.own_machine import stranger
from server.quotas import Lease, Quotas, Refusal, retry_after

TENANT_HEADER = b"x-paceline-tenant"
TENANT_NAME = re.compile(TENANT_PATTERN.encode())

STATE_IDENTITY = "paceline_identity"
STATE_LEASE = "paceline_lease"

OPEN = ("/dashboard",)
"""Needs no key: a static page, which asks for the key itself. Nor does a browser's preflight of any route,
which carries none: vLLM's CORS middleware answers it, and nothing behind that is reached."""

INFERENCE = (
    "/v1/models", "/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/embeddings",
    "/v1/score", "/v1/rerank", "/v1/realtime", "/v1/audio", "/v1/systemone", "/v2/embed", "/v2/rerank",
    "/cohere/v2/chat", "/classify", "/score", "/rerank", "/pooling", "/generative_scoring",
    "/invocations", "/inference/v1/generate", "/tokenize", "/detokenize", "/health", "/ping", "/ready",
    "/version", "/v1/paceline",
)  # fmt: skip
"""What every key reaches, with what lies below. Our own routes look at the role themselves."""

INFERENCE_ALONE = ("/v1/responses", "/v1/responses/render")
"""What every key reaches, without what lies below: a stored response may be another tenant's."""

FIGURES = ("/metrics", "/load")
"""What a monitor reaches too."""

BYTES_PER_TOKEN = 3
"""Of a request's body, for the reservation of its prompt: English has about 4, most other text fewer."""

OUTPUT_GUESS = 256
"""Output tokens reserved for a choice whose request sets no limit."""


@dataclass(frozen=True)
class Identity:
    """Whose request it is, and what it may see."""

    tenant: str
    role: Role = "tenant"
    rules: TenantRules = field(default_factory=TenantRules)
    never_learn: bool = False
    """Its key excludes it, whatever the tenant's rules and the request say."""
    ranked: bool = False
    """Whether priorities are in force."""
    came: float = field(default_factory=time.monotonic, compare=False)
    """When its request came, before its body."""

    @property
    def admin(self) -> bool:
        """May change what is served, and purge any tenant."""
        return self.role == "admin"

    @property
    def sees_all(self) -> bool:
        """May see the figures of the whole server and of every tenant."""
        return self.role in ("admin", "monitor")

    @property
    def learn(self) -> bool:
        """Whether a request that says nothing is learned from."""
        return self.learns(None)

    def learns(self, wish: bool | None) -> bool:
        """Whether a request is learned from that wishes so, wishes not, or (None) says nothing."""
        if self.never_learn or self.rules.learn == "never":
            return False
        return self.rules.learn == "opt-out" if wish is None else wish

    def may_purge(self, tenant: str) -> bool:
        return self.admin or self.tenant == tenant


def identity_of(request: Request) -> Identity:
    """Whose request it is; Access has put it there."""
    identity: Identity = request.scope["state"][STATE_IDENTITY]
    return identity


def require_admin(request: Request) -> Identity:
    """Raises HTTPException 403 unless the request came with an admin's key."""
    identity = identity_of(request)
    if not identity.admin:
        raise HTTPException(403, "this needs an admin key")
    return identity


def require_figures(request: Request) -> Identity:
    """Raises HTTPException 403 unless the request may see the whole server's figures."""
    identity = identity_of(request)
    if not identity.sees_all:
        raise HTTPException(403, "this needs a monitor's or an admin's key")
    return identity


@dataclass
class Gate:
    """The keys that are in force: those of the keys file, and the two of the settings.

    With none of them, requests from this machine are an admin's, as the settings let the server
    listen on loopback only.
    """

    api_key: str | None = None
    admin_key: str | None = None
    ring: KeyRing | None = None
    now: Callable[[], float] = time.time
    """Seconds since the epoch, for expiry."""

    def __post_init__(self) -> None:
        self._own: dict[bytes, KeyEntry] = {}
        if self.api_key is not None:
            # Alone it is everything; beside an admin key it speaks for tenants and changes nothing.
            self._add(self.api_key, "gateway" if self.admin_key else "admin")
        if self.admin_key is not None:
            self._add(self.admin_key, "admin")
        self.api_key = self.admin_key = None  # the digests are all that is needed

    def _add(self, key: str, role: Role) -> None:
        digest = hashlib.sha256(key.encode()).digest()
        self._own[digest] = KeyEntry(sha256=digest.hex(), role=role)

    @property
    def guarded(self) -> bool:
        """Whether every request has to bring a key."""
        return bool(self._own) or self.ring is not None

    def identify(self, scope: Scope) -> Identity | None:
        """None for a missing, wrong or expired key; raises ValueError for a header that says nonsense."""
        headers = dict(scope["headers"])
        if not self.guarded:
            role: Role = "admin" if _is_local(scope) else "gateway"
            return self._identity(KeyEntry(sha256="", role=role), headers)
        entry = self._entry(_key(headers))
        return None if entry is None else self._identity(entry, headers)

    def _entry(self, key: bytes) -> KeyEntry | None:
        """The entry of a key that is valid now.

        The digest of what was sent decides where is looked, and whoever does not have a key cannot
        choose its digest: how long the look-up takes tells nothing of the keys in force. What is found
        is compared in constant time.
        """
        given = hashlib.sha256(key).digest()
        found = self._own.get(given) or (self.ring.find(given) if self.ring else None)
        expected = bytes(32) if found is None else bytes.fromhex(found.sha256)
        if not hmac.compare_digest(given, expected) or found is None:
            return None
        return found if found.valid_at(self.now()) else None

    def _identity(self, entry: KeyEntry, headers: dict[bytes, bytes]) -> Identity:
        tenant = entry.tenant
        named = headers.get(TENANT_HEADER)
        if named is not None:
            if TENANT_NAME.fullmatch(named) is None:
                raise ValueError("x-paceline-tenant takes 1 to 64 letters, digits or . _ @ -")
            if entry.role in ("gateway", "admin"):
                tenant = named.decode()
            elif named.decode() != tenant:
                raise PermissionError(f"this key is tenant {tenant!r}'s, not {named.decode()!r}'s")
        rules = TenantRules() if self.ring is None else self.ring.rules(tenant)
        return Identity(tenant, entry.role, rules, not entry.learn, self.ring is not None)


def _key(headers: dict[bytes, bytes]) -> bytes:
    """Of ``Authorization: Bearer KEY``, or of Anthropic's ``x-api-key``; empty when there is none."""
    if b"authorization" in headers:
        scheme, _, key = headers[b"authorization"].partition(b" ")
        return key.strip() if scheme.lower() == b"bearer" else b""
    return headers.get(b"x-api-key", b"").strip()


def _is_local(scope: Scope) -> bool:
    client = scope.get("client")
    try:
        return client is None or ipaddress.ip_address(client[0]).is_loopback
    except ValueError:
        return False


def _reaches(identity: Identity, path: str) -> bool:
    if identity.admin or path in INFERENCE_ALONE or _below(path, INFERENCE):
        return True
    return identity.sees_all and _below(path, FIGURES)


def _below(path: str, roots: tuple[str, ...]) -> bool:
    return any(path == root or path.startswith(f"{root}/") for root in roots)


class Access:
    """Lets a request through with its identity and its lease, or answers 401, 403 or 429 itself."""

    def __init__(
        self, app: ASGIApp, gate: Gate, quotas: Quotas, refused: dict[str, int] | None = None
    ) -> None:
        """``refused`` counts what is answered here, by code."""
        self.app = app
        self.gate = gate
        self.quotas = quotas
        self.refused = {} if refused is None else refused

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket"):
            await self.app(scope, receive, send)
            return
        state = scope.setdefault("state", {})
        elsewhere = None if self.gate.guarded else stranger(dict(scope["headers"]))
        if elsewhere is not None:
            await self._refuse(scope, send, 403, "not_this_machine", elsewhere)
            return
        if _is_open(scope):
            state[STATE_IDENTITY] = Identity(DEFAULT_TENANT)
            await self.app(scope, receive, send)
            return
        try:
            identity = self.gate.identify(scope)
        except ValueError as error:
            await self._refuse(scope, send, 400, "invalid_header", str(error))
            return
        except PermissionError as error:
            await self._refuse(scope, send, 403, "wrong_tenant", str(error))
            return
        if identity is None:
            message = "Missing, wrong or expired API key. Send 'Authorization: Bearer KEY'."
            headers = [(b"www-authenticate", b"Bearer")]
            await self._refuse(scope, send, 401, "invalid_api_key", message, headers)
            return
        if not _reaches(identity, scope["path"]):
            await self._refuse(scope, send, 403, "forbidden", "This route needs an admin key.")
            return
        state[STATE_IDENTITY] = identity
        if not _counts(scope):
            await self.app(scope, receive, send)
            return
        await self._leased(identity, scope, receive, send)

    async def _leased(self, identity: Identity, scope: Scope, receive: Receive, send: Send) -> None:
        tokens = 0
        if identity.rules.tokens_per_minute is not None and scope["type"] == "http":
            body, receive = await _read(receive)
            tokens = reservation(body)
        lease = self.quotas.admit(identity.tenant, identity.rules, tokens, time.monotonic())
        if isinstance(lease, Refusal):
            headers = [(b"retry-after", retry_after(lease.retry_after_s).encode())]
            await self._refuse(scope, send, 429, "rate_limit_exceeded", lease.message, headers)
            return
        scope["state"][STATE_LEASE] = lease
        try:
            await self.app(scope, receive, send)
        finally:
            lease.release()

    async def _refuse(
        self,
        scope: Scope,
        send: Send,
        status: int,
        code: str,
        message: str,
        headers: list[tuple[bytes, bytes]] | None = None,
    ) -> None:
        self.refused[code] = self.refused.get(code, 0) + 1
        await _answer(scope, send, status, code, message, headers or [])


def lease_of(scope: Scope) -> Lease | None:
    """The request's hold on its tenant's quota."""
    lease: Lease | None = scope.get("state", {}).get(STATE_LEASE)
    return lease


def _is_open(scope: Scope) -> bool:
    if scope["type"] != "http":
        return False
    if scope["method"] == "OPTIONS":
        return _is_preflight(dict(scope["headers"]))
    return scope["method"] in ("GET", "HEAD") and _below(scope["path"], OPEN)


def _is_preflight(headers: dict[bytes, bytes]) -> bool:
    """As starlette's CORSMiddleware tells one."""
    return b"origin" in headers and b"access-control-request-method" in headers


def _counts(scope: Scope) -> bool:
    """Whether a request counts for a quota: whatever may reach the engine."""
    if scope["type"] == "websocket":
        return True
    return scope["method"] == "POST" and not _below(scope["path"], ("/v1/paceline",))


class _Limits(msgspec.Struct):
    """What a body of any of the routes says about how much it may generate."""

    max_tokens: Any = None
    max_completion_tokens: Any = None
    max_output_tokens: Any = None
    n: Any = None
    prompt: Any = None


_limits = msgspec.json.Decoder(_Limits)


def reservation(body: bytes) -> int:
    """Tokens to reserve for a request with this body; a guess, and never below 1."""
    try:
        limits = _limits.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        limits = _Limits()  # the app says what is wrong with it
    given = (limits.max_completion_tokens, limits.max_output_tokens, limits.max_tokens)
    output = next((_count(value) for value in given if value is not None), OUTPUT_GUESS)
    choices = 1 if limits.n is None else _count(limits.n)
    if isinstance(limits.prompt, list) and any(isinstance(p, str | list) for p in limits.prompt):
        choices *= len(limits.prompt)
    return max(1, len(body) // BYTES_PER_TOKEN + output * choices)


def _count(value: object) -> int:
    """A number that makes no sense is for the app to refuse."""
    return int(value) if isinstance(value, int | float) and 0 <= value < 2**31 else 1


async def _read(receive: Receive) -> tuple[bytes, Receive]:
    """The whole body, and a ``receive`` that gives it once more. The front bounds its size."""
    messages: list[Message] = []
    while True:
        messages.append(await receive())
        last = messages[-1]
        if last["type"] != "http.request" or not last.get("more_body", False):
            break
    body = b"".join(message.get("body", b"") for message in messages)
    waiting = iter(messages)

    async def again() -> Message:
        message = next(waiting, None)
        return await receive() if message is None else message

    return body, again


async def _answer(
    scope: Scope,
    send: Send,
    status: int,
    code: str,
    message: str,
    headers: list[tuple[bytes, bytes]],
) -> None:
    if scope["type"] == "websocket":
        await send({"type": "websocket.close", "code": 1013 if status == 429 else 1008})
        return
    kinds = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}
    kind = kinds.get(status, "invalid_request_error")
    error = {"message": message, "type": kind, "param": None, "code": code}
    body = json.dumps({"error": error}).encode()
    fixed = [
        (b"content-type", b"application/json"),
        (b"content-length", str(len(body)).encode()),
    ]
    start = {"type": "http.response.start", "status": status, "headers": fixed + headers}
    await send(start)
    await send({"type": "http.response.body", "body": body})
