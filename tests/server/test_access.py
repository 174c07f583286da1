"""Access as plain ASGI: who gets in, as whom, and how far."""

from __future__ import annotations

import asyncio
import hmac
import itertools
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fastapi import FastAPI
from hypothesis import given
from hypothesis import strategies as st
from starlette.middleware.cors import CORSMiddleware

from server import access
from server.access import (
    STATE_IDENTITY,
    Access,
    Gate,
    Identity,
    lease_of,
    require_admin,
    require_figures,
    reservation,
)
from server.keyring import KeyRing
from server.keys import KeyEntry, TenantRules, append_key, digest_of
from server.quotas import Quotas
from tests.server.test_middleware import call, http

KEY = "s3cret-Ключ"


def guard(app: Any = None, gate: Gate | None = None, quotas: Quotas | None = None) -> Access:
    return Access(app or anything, gate or Gate(api_key=KEY), quotas or Quotas())


def bearer(key: str) -> dict[str, Any]:
    return http(authorization=f"Bearer {key}")


async def anything(scope: dict[str, Any], receive: Any, send: Any) -> None:
    """An app that answers every path and kind of scope."""
    if scope["type"] == "http":
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"secret"})
    else:
        await send({"type": f"{scope['type']}.accepted"})


PATHS = st.sampled_from(
    ["/", "/metrics", "/health", "/ping", "/version", "/docs", "/openapi.json", "/invocations",
     "/tokenize", "/detokenize", "/load", "/pooling", "/v1", "/v1/models", "/v1/chat/completions",
     "/v1/completions", "/v1/responses", "/v1/paceline/status", "/v1/paceline/drafts/1/activate",
     "/v1/../metrics", "//metrics", "/inference/v1/generate", "/rerank", "/favicon.ico"]
) | st.text(max_size=20).map(lambda text: f"/{text}")  # fmt: skip
METHODS = st.sampled_from(["GET", "POST", "HEAD", "OPTIONS", "PUT", "DELETE", "PATCH"])


@given(
    PATHS.filter(lambda path: not f"{path}/".startswith("/dashboard/")),
    METHODS,
    st.none() | st.text(max_size=12),
)
def test_no_path_and_no_method_passes_without_the_key(path, method, given_key):
    scope = http(method=method) | {"path": path}
    if given_key is not None:
        scope["headers"] = [(b"authorization", b"Bearer " + given_key.encode())]
    sent = asyncio.run(call(guard(), scope))
    assert sent[0]["status"] == 401
    assert b"secret" not in b"".join(m.get("body", b"") for m in sent)
    error = json.loads(sent[1]["body"])["error"]
    assert error["code"] == "invalid_api_key"
    assert error["message"]


def behind_cors(gate: Gate) -> tuple[Access, list[str]]:
    """vLLM's middleware for it around an app that notes what it is asked."""
    asked: list[str] = []

    async def app(scope: dict[str, Any], receive: Any, send: Any) -> None:
        asked.append(scope["method"])
        await anything(scope, receive, send)

    allowed = CORSMiddleware(app, allow_origins=["https://app.example"], allow_headers=["*"])
    return guard(allowed, gate), asked


def preflight(origin: str) -> dict[str, Any]:
    return http(method="OPTIONS", origin=origin, access_control_request_method="GET")


def test_a_preflight_needs_no_key_and_reaches_nothing():
    app, asked = behind_cors(Gate(api_key=KEY))
    sent = asyncio.run(call(app, preflight("https://app.example")))
    assert sent[0]["status"] == 200
    assert dict(sent[0]["headers"])[b"access-control-allow-origin"] == b"https://app.example"
    assert asyncio.run(call(app, preflight("https://evil.example")))[0]["status"] == 400
    for rest in ({"origin": "https://app.example"}, {"access_control_request_method": "GET"}):
        assert asyncio.run(call(app, http(method="OPTIONS", **rest)))[0]["status"] == 401
    named = http(origin="https://app.example", access_control_request_method="GET")
    assert asyncio.run(call(app, named))[0]["status"] == 401
    assert asked == []


def test_a_preflight_from_elsewhere_is_refused_where_there_are_no_keys():
    app, asked = behind_cors(Gate())
    assert asyncio.run(call(app, preflight("https://app.example")))[0]["status"] == 403
    assert asked == []


@given(PATHS, METHODS)
def test_the_key_opens_every_path(path, method):
    scope = bearer(KEY) | {"path": path, "method": method}
    assert asyncio.run(call(guard(), scope))[0]["status"] == 200


@pytest.mark.parametrize(
    "header",
    [KEY, f"Basic {KEY}", "Bearer", "Bearer ", f"Bearer {KEY}x", f"Bearer {KEY[:-1]}",
     f"Bearer{KEY}", f"Token {KEY}"],
)  # fmt: skip
def test_only_the_whole_key_as_a_bearer_counts(header):
    sent = asyncio.run(call(guard(), http(authorization=header)))
    assert sent[0]["status"] == 401


def test_a_websocket_without_the_key_is_closed_before_the_app_sees_it():
    app = guard()
    scope = {"type": "websocket", "path": "/v1/realtime", "headers": []}
    assert asyncio.run(call(app, scope)) == [{"type": "websocket.close", "code": 1008}]
    opened = scope | {"headers": bearer(KEY)["headers"]}
    assert asyncio.run(call(app, opened)) == [{"type": "websocket.accepted"}]


def test_the_servers_own_lifespan_needs_no_key():
    sent = asyncio.run(call(guard(), {"type": "lifespan"}))
    assert sent == [{"type": "lifespan.accepted"}]


def test_keys_are_compared_in_constant_time(monkeypatch):
    """Digests of equal length go through hmac.compare_digest; the key itself is compared nowhere."""
    compared = []

    def spy(a: bytes, b: bytes) -> bool:
        compared.append((a, b))
        return hmac.compare_digest(a, b)

    monkeypatch.setattr(access, "hmac", SimpleNamespace(compare_digest=spy))
    app = guard()
    for key in ("", "x", KEY, "y" * 5000):
        asyncio.run(call(app, bearer(key)))
    assert len(compared) == 4
    assert {len(part) for pair in compared for part in pair} == {32}
    assert KEY not in repr(vars(app.gate))


# --- with a keys file ---

ROLES = ("tenant", "gateway", "monitor", "admin")


@pytest.fixture(scope="module")
def ring(tmp_path_factory: pytest.TempPathFactory) -> KeyRing:
    """One key for each role, of tenant ``team-a``; the key is the role's name. One has expired."""
    from datetime import UTC, datetime

    path: Path = tmp_path_factory.mktemp("access") / "keys.toml"
    rules = TenantRules(requests_per_minute=3, concurrent_requests=2, priority=5, learn="opt-in")
    for role in ROLES:
        entry = KeyEntry(sha256=digest_of(role), tenant="team-a", role=role)
        append_key(path, entry, rules if role == "tenant" else None)
    for name, fields in {
        "expired": {"expires": datetime(2020, 1, 1, tzinfo=UTC)},
        "excluded": {"learn": False},
    }.items():
        append_key(path, KeyEntry(sha256=digest_of(name), tenant="team-b", **fields), None)
    return KeyRing(path)


def seen_as(gate: Gate, scope: dict[str, Any]) -> Identity | int:
    """The identity that the app sees, or the status that it is refused with."""
    seen: list[Identity] = []

    async def app(scope: dict[str, Any], receive: Any, send: Any) -> None:
        seen.append(scope["state"][STATE_IDENTITY])

    scope.pop("state", None)
    sent = asyncio.run(call(guard(app, gate), scope))
    return seen[0] if seen else sent[0]["status"]


def keyed(
    key: str, path: str = "/v1/models", method: str = "GET", **headers: str
) -> dict[str, Any]:
    return http(path, method, authorization=f"Bearer {key}", **headers)


@pytest.mark.parametrize("role", ROLES)
def test_a_key_is_its_tenants_and_has_its_role_and_rules(ring, role):
    identity = seen_as(Gate(ring=ring), keyed(role))
    assert isinstance(identity, Identity)
    assert (identity.tenant, identity.role) == ("team-a", role)
    assert identity.admin == (role == "admin")
    assert identity.sees_all == (role in ("admin", "monitor"))
    assert identity.rules.priority == 5
    assert identity.learn is False
    assert identity.learns(True) is True


@pytest.mark.parametrize("role", ROLES)
def test_only_a_gateway_or_an_admin_speaks_for_another_tenant(ring, role):
    gate = Gate(ring=ring)
    other = seen_as(gate, keyed(role, x_paceline_tenant="team-b"))
    own = seen_as(gate, keyed(role, x_paceline_tenant="team-a"))
    assert isinstance(own, Identity)
    assert own.tenant == "team-a"
    if role in ("gateway", "admin"):
        assert isinstance(other, Identity)
        assert (other.tenant, other.rules) == ("team-b", TenantRules())
    else:
        assert other == 403


def test_an_expired_key_and_one_that_is_not_in_the_file_are_refused(ring):
    assert seen_as(Gate(ring=ring), keyed("expired")) == 401
    assert seen_as(Gate(ring=ring), keyed("nobody")) == 401
    assert seen_as(Gate(ring=ring, now=lambda: 0.0), keyed("expired")) != 401


def test_a_key_that_is_excluded_is_never_learned_from(ring):
    identity = seen_as(Gate(ring=ring), keyed("excluded"))
    assert isinstance(identity, Identity)
    assert not identity.learns(True)


def test_anthropics_header_is_taken_and_does_not_outweigh_a_wrong_bearer(ring):
    gate = Gate(ring=ring)
    assert isinstance(seen_as(gate, http("/v1/models", x_api_key="tenant")), Identity)
    assert seen_as(gate, http("/v1/models", x_api_key="nobody")) == 401
    both = http("/v1/models", authorization="Bearer nobody", x_api_key="tenant")
    assert seen_as(gate, both) == 401


@pytest.mark.parametrize("name", ["a b", "x" * 65, "", "a/b", "a\nb"])
def test_a_tenant_that_is_no_name_is_refused(name):
    assert seen_as(Gate(), http(x_paceline_tenant=name)) == 400


ADMINS = ["/abort_requests", "/scale_elastic_ep", "/v1/load_lora_adapter", "/pause", "/sleep",
          "/collective_rpc", "/v1/responses/resp_1", "/openapi.json", "//v1/models", "/v1/../metrics",
          "/V1/models", "/v1/chat/completionsx", "/server_info", "/update_weights"]  # fmt: skip


@pytest.mark.parametrize("path", ADMINS)
def test_what_is_not_inference_is_the_admins(ring, path):
    gate = Gate(ring=ring)
    assert isinstance(seen_as(gate, keyed("admin", path)), Identity)
    for role in ("tenant", "gateway", "monitor"):
        assert seen_as(gate, keyed(role, path)) == 403


def test_the_whole_servers_figures_are_not_a_tenants(ring):
    for role, status in {"tenant": 403, "gateway": 403, "monitor": None, "admin": None}.items():
        found = seen_as(Gate(ring=ring), keyed(role, "/metrics"))
        assert found == status if status else isinstance(found, Identity)


def test_with_an_admin_key_the_servers_own_key_speaks_for_tenants_and_changes_nothing():
    gate = Gate(api_key=KEY, admin_key="boss")
    identity = seen_as(gate, keyed(KEY, x_paceline_tenant="team-b"))
    assert isinstance(identity, Identity)
    assert (identity.tenant, identity.admin, identity.sees_all) == ("team-b", False, False)
    boss = seen_as(gate, keyed("boss"))
    assert isinstance(boss, Identity)
    assert boss.admin
    alone = seen_as(Gate(api_key=KEY), keyed(KEY))
    assert isinstance(alone, Identity)
    assert alone.admin


def test_rules_that_change_are_in_force_for_the_servers_own_keys_too(tmp_path):
    path = tmp_path / "keys.toml"
    path.touch(0o600)
    ticks = itertools.count(0.0, 2.0)
    ring = KeyRing(path, lambda: next(ticks))
    gate = Gate("gateway", "admin", ring)

    def rules() -> TenantRules:
        identity = seen_as(gate, keyed("gateway", x_paceline_tenant="team-a"))
        assert isinstance(identity, Identity)
        return identity.rules

    assert rules() == TenantRules()
    path.write_text("[tenants.team-a]\nlearn = 'never'\nreplay_share = 0.5\n")
    assert ring.replay_shares() == {"team-a": 0.5}
    path.write_text("[tenants.team-a]\nlearn = 'never'\n")
    assert rules() == TenantRules(learn="never")


def test_without_any_key_this_machine_is_the_admin_and_no_other():
    here = seen_as(Gate(), http() | {"client": ("127.0.0.1", 1)})
    assert isinstance(here, Identity)
    assert (here.admin, here.tenant, here.learn) == (True, "default", True)
    there = seen_as(Gate(), http("/v1/models") | {"client": ("10.0.0.9", 1)})
    assert isinstance(there, Identity)
    assert not there.admin


def test_the_dashboards_page_needs_no_key_and_may_change_nothing():
    gate = Gate(api_key=KEY)
    page = seen_as(gate, http("/dashboard/app.js"))
    assert isinstance(page, Identity)
    assert not page.sees_all
    assert seen_as(gate, http("/dashboard", "POST")) == 401
    assert seen_as(gate, http("/dashboards")) == 401


# --- our routes, as the server wraps them ---

CHANGES = {
    "/v1/paceline/cores": b'{"cores": 1}',
    "/v1/paceline/policy": b'{"folder": "/x", "version": 1, "sha256": "%s"}' % (b"0" * 64),
    "/v1/paceline/drafts/rollback": b"",
    "/v1/paceline/drafts/1/activate": b"",
}
"""Path -> a body that its route takes."""
FIGURES = ["/v1/paceline/drafts", "/v1/paceline/policy", "/v1/paceline/history", "/v1/paceline/feed",
           "/v1/paceline/tenants", "/v1/paceline/tenants/team-b"]  # fmt: skip


def our_app() -> FastAPI:
    from server.routes import router
    from server.routes_feed import router as feed_router
    from server.routes_tenants import router as tenants_router

    app = FastAPI()
    for one in (router, feed_router, tenants_router):
        app.include_router(one)
    return app


def json_of(key: str, path: str, method: str = "GET") -> dict[str, Any]:
    return keyed(key, path, method, content_type="application/json")


def test_every_route_of_ours_that_changes_or_tells_asks_for_its_role(ring):
    app = guard(our_app(), Gate(ring=ring))
    for role in ("tenant", "gateway", "monitor"):
        for path, body in CHANGES.items():
            sent = asyncio.run(call(app, json_of(role, path, "POST"), body))
            assert sent[0]["status"] == 403, (role, path)
    for role in ("tenant", "gateway"):
        for path in FIGURES:
            assert asyncio.run(call(app, json_of(role, path)))[0]["status"] == 403, (role, path)
        path = "/v1/paceline/tenants/team-b/traces"
        assert asyncio.run(call(app, json_of(role, path, "DELETE")))[0]["status"] == 403
    sent = asyncio.run(
        call(app, json_of("monitor", "/v1/paceline/tenants/team-b/traces", "DELETE"))
    )
    assert sent[0]["status"] == 403


def test_no_route_of_ours_is_without_a_stated_role():
    """A route that is added has to be put into one of the lists above."""
    anybodys = {"/v1/paceline/status", "/v1/paceline/tenants/{tenant}", "/dashboard",
                "/dashboard/{name}", "/v1/paceline/tenants/{tenant}/traces"}  # fmt: skip
    stated = set(CHANGES) | set(FIGURES) | anybodys
    stated.add("/v1/paceline/drafts/{version}/activate")
    framework = {"/openapi.json", "/docs", "/docs/oauth2-redirect", "/redoc"}
    paths = {route.path for route in our_app().routes}  # type: ignore[attr-defined]
    assert paths - framework <= stated


def test_the_roles_are_asked_of_the_request_itself():
    from starlette.exceptions import HTTPException

    for role in ROLES:
        scope = {"type": "http", "state": {STATE_IDENTITY: Identity("a", role)}}
        for ask, allowed in ((require_admin, ("admin",)), (require_figures, ("admin", "monitor"))):
            request = SimpleNamespace(scope=scope)
            if role in allowed:
                assert ask(request).role == role  # type: ignore[arg-type]
            else:
                with pytest.raises(HTTPException):
                    ask(request)  # type: ignore[arg-type]


# --- quotas ---


async def many(app: Any, scopes: list[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    return await asyncio.gather(*(call(app, scope) for scope in scopes))


def test_of_many_at_once_exactly_as_many_pass_as_the_quota_says(ring):
    running = most = 0

    async def slow(scope: dict[str, Any], receive: Any, send: Any) -> None:
        nonlocal running, most
        running += 1
        most = max(most, running)
        assert lease_of(scope) is not None
        await asyncio.sleep(0.01)
        running -= 1
        await anything(scope, receive, send)

    app = guard(slow, Gate(ring=ring))
    scopes = [keyed("tenant", "/v1/completions", "POST") for _ in range(50)]
    first = asyncio.run(many(app, scopes))
    assert sorted(sent[0]["status"] for sent in first) == [200] * 2 + [429] * 48
    assert most == 2
    refused = next(sent for sent in first if sent[0]["status"] == 429)
    assert int(dict(refused[0]["headers"])[b"retry-after"]) >= 1
    error = json.loads(refused[1]["body"])["error"]
    assert error["code"] == "rate_limit_exceeded"
    assert error["type"] == "rate_limit_error"
    second = asyncio.run(many(app, [dict(s, state={}) for s in scopes]))
    assert sorted(sent[0]["status"] for sent in second) == [200] + [429] * 49


def test_what_ends_badly_gives_its_place_back(ring):
    async def fails(scope: dict[str, Any], receive: Any, send: Any) -> None:
        raise RuntimeError("the app failed")

    quotas = Quotas()
    app = guard(fails, Gate(ring=ring), quotas)
    for _ in range(3):
        with pytest.raises(RuntimeError):
            asyncio.run(call(app, keyed("tenant", "/v1/completions", "POST")))
    assert quotas.running("team-a") == 0


def test_looking_is_not_counted(ring):
    app = guard(anything, Gate(ring=ring))
    for _ in range(20):
        assert asyncio.run(call(app, keyed("tenant")))[0]["status"] == 200


def test_the_app_is_given_the_body_that_was_read_for_the_reservation(tmp_path):
    path = tmp_path / "keys.toml"
    rules = TenantRules(tokens_per_minute=1000)
    append_key(path, KeyEntry(sha256=digest_of("k"), tenant="a"), rules)
    got: list[bytes] = []

    async def reads(scope: dict[str, Any], receive: Any, send: Any) -> None:
        got.append((await receive())["body"])
        await anything(scope, receive, send)

    app = guard(reads, Gate(ring=KeyRing(path)))
    body = b'{"prompt": "x", "max_tokens": 400}'
    scopes = [keyed("k", "/v1/completions", "POST") for _ in range(3)]
    statuses = [asyncio.run(call(app, scope, body))[0]["status"] for scope in scopes]
    assert got == [body] * 3
    assert statuses == [200] * 3  # each gave its reservation back
    large = b'{"prompt": "x", "max_tokens": 400, "n": 2}'
    waiting = guard(reads, Gate(ring=KeyRing(path)))
    lease = waiting.quotas.admit("a", rules, reservation(large), 0.0)
    assert lease.reserved >= 800  # type: ignore[union-attr]


@given(st.binary(max_size=300))
def test_any_body_has_a_reservation(body):
    assert 1 <= reservation(body) <= 2**63


@pytest.mark.parametrize(
    ("body", "tokens"),
    [
        (b'{"max_tokens": 100}', 100), (b'{"max_tokens": 5, "n": 3}', 15), (b"{}", 256),
        (b'{"max_completion_tokens": 7, "max_tokens": 9}', 7), (b'{"max_output_tokens": 11}', 11),
        (b'{"prompt": ["a", "b"], "max_tokens": 4}', 8), (b'{"prompt": [1, 2], "max_tokens": 4}', 4),
        (b'{"max_tokens": "many"}', 1), (b'{"max_tokens": -5}', 1), (b"not json", 256),
    ],
)  # fmt: skip
def test_the_reservation_is_the_prompts_size_and_what_the_body_lets_be_generated(body, tokens):
    assert reservation(body) == tokens + len(body) // 3
