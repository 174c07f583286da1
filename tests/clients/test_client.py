"""PacelineClient, sync and async, against the server's real routes on a real socket."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import msgspec
import openai
import pytest

from clients.answers import CoresStatus
from clients.client import (
    AsyncPacelineClient,
    PacelineAPIError,
    PacelineClient,
    request_headers,
    usage_of,
)
from clients.process import free_port
from rlcore.feed import History, Sample
from tests.clients.paceline_app import KEY, MODEL, PacelineApp
from tests.clients.recorded import TARGET
from tests.clients.stub import running

ASK = {"model": MODEL, "messages": [{"role": "user", "content": "hello"}]}


@pytest.fixture
def server(tmp_path: Path) -> Iterator[PacelineApp]:
    with running(PacelineApp(tmp_path)) as app:
        yield app


@pytest.fixture
def client(server: PacelineApp) -> Iterator[PacelineClient]:
    with PacelineClient(server.url, api_key=KEY) as client:
        yield client


def test_every_route_has_a_typed_answer(server, client, tmp_path):
    status = client.paceline.status()
    assert (status.draft.live, status.draft.speculative_tokens, status.target.id) == (0, 2, "t")
    assert status.acceptance.live.length == 2.5
    assert status.traces.sent == 4
    assert not status.learner.alive

    done = client.paceline.activate(2)
    assert (done.live, done.previous, done.seconds) == (2, 0, 0.125)
    back = client.paceline.rollback()
    assert (back.live, back.previous) == (0, 2)
    assert server.engine.swapped == [2, 0]

    drafts = client.paceline.drafts()
    assert [draft.version for draft in drafts.drafts] == [0, 1, 2, 3]
    assert drafts.drafts[0].acceptance.accepted == [9, 6]
    assert drafts.drafts[1].origin == "learned"
    assert [change.version for change in client.paceline.history()] == [2, 0]

    folder = tmp_path / "policy"
    folder.mkdir()
    for name in ("config.json", "model.safetensors"):
        (folder / name).write_text("{}")
    (tmp_path / "config.json").write_text("{}")
    swap = client.paceline.set_policy(folder, 1, "0" * 64)
    assert (swap.version, swap.frozen_tokens) == (1, 40)
    assert client.paceline.policy().swaps == [swap]

    assert client.paceline.set_cores(3) == CoresStatus(usable=4, allotted=3, threads=3)
    assert client.paceline.status().cores.allotted == 3

    purged = client.paceline.purge("team-a")
    assert (purged.tenant, purged.deleted.replay_spans) == ("team-a", 3)
    assert server.purged == ["team-a"]


def test_what_the_server_refuses_has_its_status_and_its_words(server, client, tmp_path):
    with pytest.raises(PacelineAPIError, match="there is no draft version 99") as refused:
        client.paceline.activate(99)
    assert refused.value.status == 404
    with pytest.raises(PacelineAPIError) as refused:
        client.paceline.set_policy(tmp_path / "nothing", 5, "0" * 64)
    assert refused.value.status == 409
    with (
        PacelineClient(server.url, api_key="wrong") as other,
        pytest.raises(PacelineAPIError, match="API key") as refused,
    ):
        other.paceline.status()
    assert refused.value.status == 401


def test_a_server_that_is_not_there_is_said(monkeypatch):
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    url = f"http://127.0.0.1:{free_port()}"
    with (
        PacelineClient(url) as client,
        pytest.raises(PacelineAPIError, match=f"no server answers at {url}/v1") as refused,
    ):
        client.paceline.status()
    assert refused.value.status is None


def test_a_request_that_was_sent_is_never_sent_again():
    """Its connection is cut without an answer: it may have been done."""
    taken = []
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def cut_all() -> None:
            with contextlib.suppress(OSError):
                while True:
                    connection, _ = listening.accept()
                    taken.append(connection.recv(65536))
                    connection.close()

        threading.Thread(target=cut_all, daemon=True).start()
        url = f"http://127.0.0.1:{listening.getsockname()[1]}"
        with PacelineClient(url) as client, pytest.raises(PacelineAPIError, match=url):
            client.paceline.rollback()
        listening.shutdown(socket.SHUT_RDWR)
    assert len(taken) == 1


def test_it_is_an_openai_client_and_options_of_requests_are_headers(server, client):
    assert isinstance(client, openai.OpenAI)
    plain = client.chat.completions.create(**ASK)
    assert plain.choices[0].message.content == server.text
    assert usage_of(plain) is None

    told = client.for_requests(learn=False, tenant="team-a", usage=True)
    usage = usage_of(told.chat.completions.create(**ASK))
    assert usage is not None
    assert usage.accepted == 4
    assert usage.length == 3
    once = client.chat.completions.create(**ASK, extra_headers=request_headers(learn=True))
    assert usage_of(once) is None

    first, second, third = server.headers
    assert not any(name.startswith("x-paceline") for name in first)
    assert second["x-paceline-learn"] == "false"
    assert second["x-paceline-tenant"] == "team-a"
    assert second["x-paceline-usage"] == "true"
    assert third["x-paceline-learn"] == "true"
    assert told.paceline.status().draft.live == 0


def test_a_streams_last_chunk_has_the_usage(server, client):
    stream = client.for_requests(usage=True).chat.completions.create(
        **ASK, stream=True, stream_options={"include_usage": True}
    )
    *chunks, last = stream
    assert "".join(c.choices[0].delta.content or "" for c in chunks) == server.text
    assert usage_of(last).versions[0].accepted == [2, 2]


def test_the_feed_is_a_history_and_then_samples(server, client):
    first, *samples = itertools.islice(client.paceline.feed(60), 4)
    assert isinstance(first, History)
    assert first.target == TARGET
    assert 55 <= len(first.samples) <= 61
    assert all(isinstance(sample, Sample) for sample in samples)


def test_the_async_client_does_the_same(server, tmp_path):
    async def use() -> None:
        async with AsyncPacelineClient(server.url.removesuffix("/v1"), api_key=KEY) as client:
            assert isinstance(client, openai.AsyncOpenAI)
            paceline = client.paceline
            assert (await paceline.status()).draft.live == 0
            assert (await paceline.activate(3)).live == 3
            assert (await paceline.rollback()).live == 0
            assert [change.version for change in await paceline.history()] == [3, 0]
            assert len((await paceline.drafts()).drafts) == 4
            assert (await paceline.policy()).live == 0
            assert (await paceline.purge("a")).deleted.recorded_traces == 1
            with pytest.raises(PacelineAPIError, match="409"):
                await paceline.set_policy(tmp_path / "nothing", 5, "0" * 64)
            assert (await paceline.set_cores(2)).threads == 2
            answer = await client.for_requests(usage=True).chat.completions.create(**ASK)
            assert usage_of(answer).accepted == 4
            seen = []
            async for event in paceline.feed(60):
                seen.append(event)
                if len(seen) == 3:
                    break
            assert [type(event) for event in seen] == [History, Sample, Sample]

    asyncio.run(use())


def test_the_key_of_another_service_is_not_sent(server, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "sk-other")
    assert PacelineClient(server.url).api_key == "none"
    monkeypatch.setenv("PACELINE_API_KEY", KEY)
    with PacelineClient(server.url) as client:
        assert client.paceline.status().draft.live == 0


def test_an_answer_that_cannot_be_read_is_said(server, client, monkeypatch):
    from server import routes

    monkeypatch.setattr(routes, "status", lambda state: {"draft": 1})
    with pytest.raises(PacelineAPIError, match="cannot read"):
        client.paceline.status()


def test_fields_that_a_newer_server_adds_are_no_error(server, client, monkeypatch):
    from server import routes

    whole = routes.status
    monkeypatch.setattr(routes, "status", lambda state: whole(state) | {"weather": "fine"})
    assert json.loads(msgspec.json.encode(client.paceline.status()))["draft"]["live"] == 0
