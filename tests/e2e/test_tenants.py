"""Tenants of a real server: what is kept of them, what is deleted, what they can tell of each other."""

from __future__ import annotations

import json
import os
import statistics
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import msgspec
import numpy as np
import pytest

from clients.process import ServerProcess
from server.keys import KeyEntry, TenantRules, append_key, digest_of
from tests.conftest import ONE_THREAD, QUICK_LEARNING

pytestmark = pytest.mark.slow

WINDOW = 10
"""Token ids in a row that are searched for; by chance they are nowhere else."""

FEW = 5

TENANTS = {
    "alice": TenantRules(),
    "carol": TenantRules(),
    "bob": TenantRules(learn="never"),
    "dave": TenantRules(learn="opt-in"),
    "few": TenantRules(requests_per_minute=FEW, learn="never"),
    "tight": TenantRules(tokens_per_minute=400, learn="never"),
}


@dataclass
class Tenants:
    """A server with a learner of its own and a keys file; a tenant's key is its name."""

    server: ServerProcess
    model: str
    notes: dict[str, Any] = field(default_factory=dict)

    def post(self, tenant: str, path: str, body: dict[str, Any], **headers: str) -> httpx.Response:
        headers = {"authorization": f"Bearer {tenant}", **headers}
        url = self.server.url + path
        return httpx.post(url, json=body, headers=headers, timeout=120, trust_env=False)

    def ask(self, tenant: str, prompt: str, tokens: int = 40, **headers: str) -> list[int]:
        """Token ids of prompt and answer."""
        body = {
            "model": self.model, "prompt": prompt, "max_tokens": tokens, "ignore_eos": True,
            "temperature": 1.0, "return_token_ids": True,
        }  # fmt: skip
        answer = self.post(tenant, "/v1/completions", body, **headers)
        assert answer.status_code == 200, answer.text
        choice = answer.json()["choices"][0]
        assert len(choice["token_ids"]) == tokens
        return [*choice["prompt_token_ids"], *choice["token_ids"]]

    def purge(self, key: str, tenant: str) -> httpx.Response:
        url = f"{self.server.url}/v1/paceline/tenants/{tenant}/traces"
        headers = {"authorization": f"Bearer {key}"}
        return httpx.delete(url, headers=headers, timeout=120, trust_env=False)

    def status(self) -> dict[str, Any]:
        headers = {"authorization": "Bearer boss"}
        url = f"{self.server.url}/v1/paceline/status"
        body: dict[str, Any] = httpx.get(url, headers=headers, trust_env=False).json()
        return body


@pytest.fixture(scope="module")
def tenants(embedded_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tenants]:
    folder = tmp_path_factory.mktemp("tenants")
    keys = folder / "keys.toml"
    for name, rules in TENANTS.items():
        append_key(keys, KeyEntry(digest_of(name), name), rules)
    append_key(keys, KeyEntry(digest_of("boss"), role="admin"), None)
    flags = [
        "--target", str(embedded_model), "--draft", "none", "--max-model-len", "2048",
        "--keys-file", str(keys), *QUICK_LEARNING, "--", "--enable-prompt-tokens-details",
    ]  # fmt: skip
    server = ServerProcess(
        folder / "home", flags, env=ONE_THREAD, start_deadline_s=240, api_key="boss"
    )
    with server:
        yield Tenants(server, embedded_model.name)


# --- searching for token ids ---


def encodings(ids: list[int]) -> list[bytes]:
    """Every form in which the code writes token ids, or could."""
    packed = b"".join(msgspec.msgpack.encode(i) for i in ids)
    plain = json.dumps(ids)[1:-1].encode()
    return [
        packed,
        np.asarray(ids, np.int32).tobytes(),
        np.asarray(ids, np.int64).tobytes(),
        plain,
        plain.replace(b" ", b""),
    ]


def found(home: Path, ids: list[int]) -> list[Path]:
    """Files of the whole home folder that hold a run of these token ids, from anywhere in it."""
    runs = [ids[at : at + WINDOW] for at in range(0, len(ids) - WINDOW + 1, WINDOW)]
    wanted = [pattern for run in runs for pattern in encodings(run)]
    return [path for path, text in contents(home) if any(pattern in text for pattern in wanted)]


def contents(home: Path) -> Iterator[tuple[Path, bytes]]:
    """Of every file; the learner replaces some of them meanwhile."""
    for folder, _, names in os.walk(home):
        for path in (Path(folder) / name for name in names):
            if path.is_file() and not path.is_symlink():
                with suppress(FileNotFoundError):
                    yield path, path.read_bytes()


def wait_for(true: Callable[[], bool], deadline_s: float, what: str) -> None:
    end = time.monotonic() + deadline_s
    while not true():
        assert time.monotonic() < end, f"not in time: {what}"
        time.sleep(0.5)


@pytest.mark.parametrize(
    "ids", [[1, 127, 128, 255, 256, 65535, 65536, 9, 8, 7], list(range(300, 310))]
)
def test_the_search_finds_every_encoding(tmp_path, ids):
    for i, pattern in enumerate(encodings(ids)):
        folder = tmp_path / str(i)
        folder.mkdir()
        (folder / "x").write_bytes(b"\0" * 3 + pattern + b"\0")
        assert found(folder, ids)
    assert not found(tmp_path / "0", [i + 1 for i in ids])


# --- learning ---


def test_an_opted_out_request_leaves_no_trace_anywhere(tenants: Tenants) -> None:
    home = tenants.server.home
    out = {
        "a request that opts out": tenants.ask(
            "alice",
            "The tale of the silent lighthouse of Brunnmar:",
            **{"x-paceline-learn": "false"},
        ),
        "a tenant that is excluded": tenants.ask(
            "bob", "Seven rules for taming copper foxes:", **{"x-paceline-learn": "true"}
        ),
        "a tenant that has to be asked": tenants.ask("dave", "A letter from the moth collector:"),
    }
    kept = {
        "control": tenants.ask("carol", "The ballad of the patient ferryman of Ostrelow:"),
        "asked": tenants.ask("dave", "A song of nine kettles:", **{"x-paceline-learn": "true"}),
    }
    for name, ids in kept.items():
        wait_for(lambda ids=ids: bool(found(home, ids)), 120, f"{name} on the disk")
    for name, ids in out.items():
        assert found(home, ids) == [], name
    assert tenants.status()["traces"]["dropped"]["opted_out"] >= 3
    words = [b"patient ferryman", b"silent lighthouse"]
    assert [p for p, text in contents(home) if any(word in text for word in words)] == []
    private = [p for p in (home / "learner").rglob("*") if p.stat().st_mode & 0o077 and p.is_file()]
    assert private == []


def test_a_purge_purges_also_after_a_restart_and_leaves_the_others(tenants: Tenants) -> None:
    home = tenants.server.home
    alice = [tenants.ask("alice", f"Chronicle {i} of the amber harbour:", 60) for i in range(6)]
    carol = [tenants.ask("carol", f"Notes {i} on the winter orchard:", 60) for i in range(6)]
    for ids in (*alice, *carol):
        wait_for(lambda ids=ids: bool(found(home, ids)), 120, "on the disk")
    assert tenants.purge("carol", "alice").status_code == 403
    answer = tenants.purge("alice", "alice")
    assert answer.status_code == 200, answer.text
    deleted = answer.json()["deleted"]
    assert deleted["journal_traces"] == 6
    assert deleted["replay_spans"] + deleted["heldout_spans"] == 6
    assert [found(home, ids) for ids in alice] == [[]] * 6
    assert all(found(home, ids) for ids in carol)
    again = tenants.purge("boss", "alice").json()["deleted"]
    assert set(again.values()) == {0}
    later = tenants.ask("alice", "Another page altogether, written when the house was empty again:")
    wait_for(lambda: bool(found(home, later)), 120, "what came after the purge")
    tenants.server.stop()
    assert [found(home, ids) for ids in alice] == [[]] * 6
    tenants.server.start()
    wait_for(lambda: tenants.status()["learner"].get("replay_tokens", 0) > 0, 120, "the learner")
    assert [found(home, ids) for ids in alice] == [[]] * 6
    assert all(found(home, ids) for ids in carol)
    assert found(home, later)
    print("purged:", deleted)


# --- quotas ---


def test_of_fifty_at_once_exactly_as_many_pass_as_the_quota_says(tenants: Tenants) -> None:
    body = {"model": tenants.model, "prompt": "x", "max_tokens": 2}
    headers = {"authorization": "Bearer few"}
    limits = httpx.Limits(max_connections=50)
    with (
        httpx.Client(headers=headers, timeout=120, limits=limits, trust_env=False) as client,
        ThreadPoolExecutor(50) as pool,
    ):
        url = f"{tenants.server.url}/v1/completions"
        answers = list(pool.map(lambda _: client.post(url, json=body), range(50)))
    codes = [answer.status_code for answer in answers]
    refused = next(answer for answer in answers if answer.status_code == 429)
    assert 1 <= int(refused.headers["retry-after"]) <= 60
    assert refused.json()["error"]["code"] == "rate_limit_exceeded"
    print("passed:", codes.count(200), "refused:", codes.count(429))
    assert (codes.count(200), codes.count(429)) == (FEW, 50 - FEW)


def test_streamed_tokens_are_charged_as_they_are_counted(tenants: Tenants) -> None:
    body = {"model": tenants.model, "prompt": "x", "max_tokens": 350, "ignore_eos": True}
    stream = body | {"stream": True, "stream_options": {"include_usage": True}}
    first = tenants.post("tight", "/v1/completions", stream)
    assert first.status_code == 200
    second = tenants.post("tight", "/v1/completions", body)
    assert second.status_code == 429
    small = tenants.post("tight", "/v1/completions", body | {"max_tokens": 20})
    assert small.status_code == 200, small.text


# --- the prefix cache ---


def long_prompt(number: int) -> str:
    words = [f"item {number * 1000 + i} stands on shelf {i * 7 % 97}," for i in range(95)]
    return " ".join(words)


def first_token(tenants: Tenants, tenant: str, prompt: str) -> tuple[float, int, int]:
    """(seconds to the first token, prompt tokens, of these cached)"""
    body = {
        "model": tenants.model, "prompt": prompt, "max_tokens": 1, "stream": True,
        "stream_options": {"include_usage": True},
    }  # fmt: skip
    headers = {"authorization": f"Bearer {tenant}", "x-paceline-learn": "false"}
    url = f"{tenants.server.url}/v1/completions"
    started = time.perf_counter()
    seconds, usage = None, None
    with httpx.stream(
        "POST", url, json=body, headers=headers, timeout=120, trust_env=False
    ) as answer:
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                seconds = seconds or time.perf_counter() - started
                usage = json.loads(line[6:]).get("usage") or usage
    assert seconds is not None
    assert usage is not None
    return seconds, usage["prompt_tokens"], cached(usage)


def cached(usage: dict[str, Any]) -> int:
    details = usage.get("prompt_tokens_details") or usage.get("input_tokens_details") or {}
    return details.get("cached_tokens") or usage.get("cache_read_input_tokens") or 0


def test_another_tenants_warm_prompt_is_as_slow_as_a_cold_one(tenants: Tenants) -> None:
    cold, warm, other, cold_again = [], [], [], []
    first_token(tenants, "alice", long_prompt(999))
    for number in range(100, 108):
        prompt = long_prompt(number)
        seconds, length, hit = first_token(tenants, "alice", prompt)
        assert (length > 1200, hit) == (True, 0)
        cold.append(seconds)
        seconds, _, hit = first_token(tenants, "alice", prompt)
        assert hit > 1000
        warm.append(seconds)
        seconds, _, hit = first_token(tenants, "carol", prompt)
        assert hit == 0
        other.append(seconds)
        seconds, _, hit = first_token(tenants, "carol", long_prompt(100 + number))
        assert hit == 0
        cold_again.append(seconds)
    medians = [statistics.median(x) for x in (cold, warm, other, cold_again)]
    print("time to first token, ms: cold, warm, another's warm, another's cold:",
          [round(1000 * m) for m in medians], f"prompt of {length} tokens")  # fmt: skip
    assert medians[1] < 0.6 * medians[0]
    assert 0.75 < medians[2] / medians[3] < 1.33
    # Of two samples that do not differ, the rank sum is beyond this once in 1,500 times (n = m = 8).
    ranks = sorted([*((x, "other") for x in other), *((x, "cold") for x in cold_again)])
    total = sum(rank for rank, (_, name) in enumerate(ranks, 1) if name == "other")
    assert 38 <= total <= 98, total


ROUTES: dict[str, Callable[[str, str], dict[str, Any]]] = {
    "/v1/chat/completions": lambda model, text: {
        "model": model, "max_tokens": 1, "messages": [{"role": "user", "content": text}]},
    "/v1/completions": lambda model, text: {"model": model, "max_tokens": 1, "prompt": text},
    "/v1/responses": lambda model, text: {
        "model": model, "max_output_tokens": 1, "input": text, "store": False},
    "/v1/messages": lambda model, text: {
        "model": model, "max_tokens": 1, "messages": [{"role": "user", "content": text}]},
}  # fmt: skip


@pytest.mark.parametrize("path", ROUTES)
def test_no_route_reaches_another_tenants_cache(tenants: Tenants, path: str) -> None:
    body = ROUTES[path](tenants.model, long_prompt(2000 + list(ROUTES).index(path)))
    hits = []
    for tenant in ("alice", "carol", "alice", "carol"):
        answer = tenants.post(tenant, path, body, **{"x-paceline-learn": "false"})
        assert answer.status_code == 200, answer.text
        hits.append(cached(answer.json()["usage"]))
    assert hits[:2] == [0, 0]
    if path != "/v1/messages" or hits[2]:
        assert min(hits[2:]) > 1000


def test_a_clients_own_salt_reaches_no_other_tenant_and_divides_its_own_cache(
    tenants: Tenants,
) -> None:
    def hit(tenant: str, salt: str | None) -> int:
        body = ROUTES["/v1/completions"](tenants.model, long_prompt(3000))
        body |= {} if salt is None else {"cache_salt": salt}
        answer = tenants.post(tenant, "/v1/completions", body, **{"x-paceline-learn": "false"})
        assert answer.status_code == 200, answer.text
        return cached(answer.json()["usage"])

    assert hit("alice", "mine") == 0
    assert hit("alice", "mine") > 1000
    assert hit("carol", "mine") == 0
    assert hit("alice", None) == 0
    assert hit("alice", "other") == 0


def test_a_tenant_sees_its_own_figures_only(tenants: Tenants) -> None:
    def get(key: str, path: str) -> httpx.Response:
        headers = {"authorization": f"Bearer {key}"}
        return httpx.get(tenants.server.url + path, headers=headers, trust_env=False)

    assert get("alice", "/v1/paceline/tenants/alice").json()["tenant"] == "alice"
    for path in ("/v1/paceline/tenants/carol", "/v1/paceline/tenants", "/metrics",
                 "/v1/paceline/drafts", "/v1/paceline/history"):  # fmt: skip
        assert get("alice", path).status_code == 403, path
        assert get("boss", path).status_code == 200, path
    assert "acceptance" not in get("alice", "/v1/paceline/status").json()
    assert get("alice", "/v1/models").status_code == 200
    assert get("nobody", "/v1/models").status_code == 401
