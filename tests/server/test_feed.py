"""The feed on a real socket: its events, its bounds, its end; and the page's files with their headers."""

from __future__ import annotations

import asyncio
import itertools
import json
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from rlcore.feed import Change, History, Sample
from server import feed as feed_module
from server.feed import QUEUED_EVENTS, Subscriber
from server.routes_feed import FILES
from tests.server.stand_in import StandIn

KINDS = {"history": History, "sample": Sample, "change": Change}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StandIn]:
    with StandIn(tmp_path_factory.mktemp("stand-in"), past_s=30) as server:
        yield server


def events(
    url: str, path: str = "/v1/paceline/feed", headers: dict[str, str] | None = None
) -> Iterator[tuple[str, Any]]:
    with httpx.stream("GET", url + path, headers=headers, timeout=10) as response:
        assert response.status_code == 200
        assert response.headers["content-type"] == "text/event-stream"
        name = ""
        for line in response.iter_lines():
            if line.startswith("event: "):
                name = line[7:]
            elif line.startswith("data: "):
                yield name, msgspec.json.decode(line[6:], type=KINDS[name])


def next_of(name: str, stream: Iterator[tuple[str, Any]]) -> Any:
    return next(value for kind, value in stream if kind == name)


def wait_for(what: Any, seconds: float = 10.0) -> None:
    deadline = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.05)


def test_history_comes_first_then_a_sample_a_second(server: StandIn):
    stream = events(server.url)
    name, history = next(stream)
    assert name == "history"
    assert len(history.samples) >= 30
    times = [sample.time for sample in history.samples]
    assert times == sorted(times)
    assert all(sample.tenants == () for sample in history.samples)
    first, second = next_of("sample", stream), next_of("sample", stream)
    assert 0.5 < second.time - first.time < 3
    assert second.speedup == pytest.approx(1.6, abs=0.3)
    assert second.plain_tokens_per_s == pytest.approx(
        second.tokens_per_s / second.speedup, rel=0.01
    )
    assert {tenant.name for tenant in second.tenants} == {"acme", "globex", "initech"}
    assert second.learner.state == "training"
    assert second.drafts.most == 3


def test_what_the_page_is_told_is_what_the_documentation_says(server: StandIn):
    """The example's keys, all levels."""
    text = (Path(__file__).parents[2] / "docs" / "dashboard.md").read_text()
    example = json.loads(text.split("```json\n")[1].split("```")[0])
    sample = msgspec.to_builtins(next_of("sample", events(server.url)))
    assert sample.keys() == example.keys()
    for part in ("drafts", "learner", "traces"):
        assert sample[part].keys() == example[part].keys()
    assert sample["tenants"][0].keys() == example["tenants"][0].keys()


def test_no_more_history_comes_than_was_asked_for(server: StandIn):
    _, history = next(events(server.url, "/v1/paceline/feed?history=5"))
    assert 1 <= len(history.samples) <= 6
    for seconds in ("-1", "86401", "x"):
        assert httpx.get(f"{server.url}/v1/paceline/feed?history={seconds}").status_code == 422


def test_a_swap_is_told_at_once_and_remembered(server: StandIn):
    stream = events(server.url)
    next(stream)
    server.call(server.drafts.activate(5, "promoted"))
    change = next_of("change", stream)
    assert (change.kind, change.version, change.cause) == ("swap", 5, "promoted")
    server.call(server.drafts.activate(3, "rolled_back", "worse"))
    change = next_of("change", stream)
    assert (change.kind, change.version, change.before) == ("rollback", 3, 5)
    assert change.reason == "worse"
    _, history = next(events(server.url))
    assert [c.kind for c in history.changes[-2:]] == ["swap", "rollback"]


def test_swaps_that_follow_at_once_are_all_told(server: StandIn):
    stream = events(server.url)
    next(stream)

    async def both() -> None:
        await asyncio.gather(server.drafts.activate(1), server.drafts.activate(2))

    server.call(both())
    told = [next_of("change", stream).version for _ in range(2)]
    assert told == [1, 2]


def test_a_drift_is_told_when_the_learner_counts_one(server: StandIn):
    stream = events(server.url)
    next_of("sample", stream)
    server.traffic.learner.pace = "the traffic has changed"
    server.traffic.learner.drifts += 1
    change = next_of("change", stream)
    assert (change.kind, change.version) == ("drift", None)
    assert change.reason == "the traffic has changed"


def test_an_engine_that_is_new_is_not_compared_with_the_old_one(tmp_path: Path):
    with StandIn(tmp_path, past_s=20) as server:
        stream = events(server.url)
        next_of("sample", stream)
        server.traffic.speculation.scheduler = "another"
        server.traffic.speculation.seconds = server.traffic.speculation.plain_seconds = 0.0
        for _ in range(4):
            sample = next_of("sample", stream)
            assert sample.speedup is None or 0.5 < sample.speedup < 3


def test_only_so_many_feeds_are_open_at_once(server: StandIn, monkeypatch: pytest.MonkeyPatch):
    wait_for(lambda: server.feed.subscribers == 0)
    monkeypatch.setattr(feed_module, "MOST_SUBSCRIBERS", 2)
    held = [events(server.url), events(server.url)]
    for stream in held:
        next(stream)
    refused = httpx.get(f"{server.url}/v1/paceline/feed")
    assert refused.status_code == 503
    assert int(refused.headers["retry-after"]) > 0
    held.pop().close()  # type: ignore[attr-defined]
    wait_for(lambda: server.feed.subscribers == 1)
    assert next(events(server.url))[0] == "history"


def test_a_client_that_does_not_read_is_left_and_the_others_go_on(server: StandIn):
    wait_for(lambda: server.feed.subscribers == 0)
    host, port = server.url.removeprefix("http://").split(":")
    slow = socket.create_connection((host, int(port)))
    slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    slow.sendall(b"GET /v1/paceline/feed HTTP/1.1\r\nHost: localhost\r\n\r\n")
    wait_for(lambda: server.feed.subscribers == 1)
    dropped = server.feed.dropped

    async def flood() -> None:
        """What a day would bring, faster than it is read."""
        big = feed_module.event("sample", server.feed.last) * 400
        for _ in range(QUEUED_EVENTS * 4):
            server.feed._tell(big)
            await asyncio.sleep(0)

    server.call(flood())
    wait_for(lambda: server.feed.dropped == dropped + 1)
    assert server.feed.subscribers == 0
    assert next(events(server.url))[0] == "history"
    slow.close()


def test_a_feed_ends_with_the_server(tmp_path: Path):
    server = StandIn(tmp_path)
    with server:
        stream = events(server.url)
        next(stream)
        began = time.monotonic()
    assert time.monotonic() - began < 10
    assert all(kind in KINDS for kind, _ in stream)  # a complete response: httpx would raise


def test_a_subscriber_that_waits_hears_a_heartbeat_and_its_end_is_final():
    async def listen() -> list[bytes]:
        subscriber = Subscriber()
        heard = []
        async for event in subscriber.events(0.02):
            heard.append(event)
            if len(heard) == 2:
                subscriber.end()
        return heard

    heard = asyncio.run(listen())
    assert heard == [b": still here\n\n"] * 2


def test_the_feed_needs_a_key_that_sees_all_and_the_page_needs_none(tmp_path: Path):
    with StandIn(tmp_path, key="sk-1") as server:
        assert httpx.get(f"{server.url}/v1/paceline/feed").status_code == 401
        assert httpx.get(f"{server.url}/dashboard").status_code == 200
        assert next(events(server.url, headers={"Authorization": "Bearer sk-1"}))[0] == "history"
        assert httpx.get(f"{server.url}/v1/paceline/feed?key=sk-1").status_code == 401


@pytest.mark.parametrize("name", ["", *sorted(FILES)])
def test_every_file_of_the_page_is_served_with_a_strict_policy(server: StandIn, name: str):
    response = httpx.get(f"{server.url}/dashboard{'/' if name else ''}{name}")
    assert response.status_code == 200
    policy = response.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert "http" not in policy
    assert response.headers["x-content-type-options"] == "nosniff"
    if name.endswith(".js"):
        assert response.headers["content-type"].startswith("text/javascript")


@pytest.mark.parametrize(
    "name", ["nothing.js", "../app.py", "..%2f..%2fapp.py", "%2e%2e/app.py", "uplot-LICENSE.txt"]
)
def test_nothing_but_the_pages_files_is_served(server: StandIn, name: str):
    assert httpx.get(f"{server.url}/dashboard/{name}").status_code == 404


def test_the_page_asks_for_no_other_host_and_has_no_inline_script():
    folder = Path(feed_module.__file__).parent / "dashboard"
    page = (folder / "index.html").read_text()
    assert "<script>" not in page
    assert "style=" not in page
    assert "//" not in page.replace("<!doctype html>", "")
    for name in FILES - {"uplot.js", "uplot.css", "icon.svg", "index.html"}:
        text = (folder / name).read_text()
        assert "http://" not in text
        assert "https://" not in text
        assert "innerHTML" not in text


def test_minutes_are_kept_when_the_seconds_are_gone(
    server: StandIn, monkeypatch: pytest.MonkeyPatch
):
    """Fifty minutes, lived in a moment: bounded, and in order."""
    monkeypatch.setattr(feed_module, "KEPT_SECONDS", 300)
    monkeypatch.setattr(feed_module, "KEPT_MINUTES", 40)
    feed = feed_module.Feed(server.feed._state)
    feed._next_minute = 0.0
    wall = time.time() - 3000
    for second in range(3000):
        feed.tick(float(second), wall + second)
    times = [sample.time for sample in feed.history(86_400).samples]
    assert times == sorted(times)
    apart = [round(b - a) for a, b in itertools.pairwise(times)]
    assert apart[-299:] == [1] * 299
    assert set(apart[:-300]) == {60}
    assert len(times) <= 340
    assert times[0] - wall == pytest.approx(600, abs=60)
