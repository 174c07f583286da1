"""Each fault once, under load, on real processes: no request is lost that the fault did not itself cut.

The long version, with figures, is ``python -m clients.bench.chaos``. A killed learner, bad versions that are
announced or activated, and nonsense sent to a learner have tests of their own.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from clients.bench import chaos, chaos_faults, chaos_traces
from clients.bench.chaos_load import Load
from clients.bench.chaos_watch import Watch, until
from clients.process import ServerProcess
from tests.conftest import ONE_THREAD

pytestmark = pytest.mark.slow

CLIENTS = 3

Fault = Callable[[ServerProcess, Load], dict[str, Any]]


@pytest.fixture(scope="module")
def clock(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, str]]:
    return chaos_faults.shifted_clock(tmp_path_factory.mktemp("clock"))


@pytest.fixture(scope="module")
def server(
    embedded_model: Path,
    tmp_path_factory: pytest.TempPathFactory,
    clock: tuple[Path, dict[str, str]],
) -> Iterator[ServerProcess]:
    """One server for all faults, which has to survive each; its disks are small where they may be."""
    home = tmp_path_factory.mktemp("chaos") / "home"
    flags = ["--target", str(embedded_model), *chaos.FLAGS, "--drain-s", "4"]
    try:
        disks = chaos_faults.small_disks(home, chaos.MEGABYTES)
        disks.__enter__()
    except OSError:
        disks = None
    try:
        with ServerProcess(
            home, flags, env={**ONE_THREAD, **clock[1]}, start_deadline_s=300
        ) as server:
            yield server
    finally:
        if disks is not None:
            disks.__exit__(None, None, None)


def under(server: ServerProcess, fault: Fault) -> dict[str, Any]:
    """A fault under load; nothing may be lost to it, and no total may go down."""
    with Watch(server) as watch, Load(server, CLIENTS, max_tokens=32) as load:
        load.wait_for_served(CLIENTS, 120)
        figures = fault(server, load)
    figures |= load.figures() | watch.figures()
    assert figures["served"] > 0
    assert figures["lost"] == 0, figures
    assert figures["decreased_totals"] == []
    assert figures["health"] == [200]
    return figures


def quiet(figures: dict[str, Any]) -> None:
    """The engine was not touched, so nobody noticed anything."""
    assert figures["cut"] == figures["turned_away"] == 0
    assert figures["ready"] == [200]


def test_weights_broken_between_their_notice_and_their_load_are_refused(server: ServerProcess):
    figures = under(server, chaos_faults.weights_damaged)
    quiet(figures)
    assert {name: a["status"] for name, a in figures["answers"].items()} == dict.fromkeys(
        chaos_faults.DAMAGES, 409
    )
    assert figures["draft_after"] == figures["draft_before"]


def test_a_flood_of_garbage_costs_no_request_and_not_the_learner(server: ServerProcess):
    figures = under(server, lambda s, load: chaos_traces.garbage_flood(s, load, 5.0, 10e6))
    quiet(figures)
    assert figures["same_learner"]
    assert figures["sent_mb"] > 0
    assert sum(figures["rejected"].values()) > 0


def test_forged_traces_are_not_learned_from_and_a_stranger_does_not_reach_the_socket(
    server: ServerProcess,
):
    figures = under(server, lambda s, load: chaos_traces.forged_traces(s, load, 20))
    quiet(figures)
    assert figures["other_user_connected"] in (False, None)
    assert sum(figures["rejected"].values()) == 20
    assert figures["taken_beyond_the_engine's"] == 0
    assert figures["same_learner"]


def test_a_clock_that_goes_back_changes_nothing(server: ServerProcess, clock: Any):
    figures = under(server, lambda s, load: chaos_faults.clock_set_back(s, load, clock[0], 3600.0))
    quiet(figures)
    before, during = figures["uptime_s"]
    assert during >= before
    assert figures["activate"] == 200
    assert figures["learner_alive"]
    assert figures["traces_sent"] > 0


def test_a_full_disk_costs_no_request_and_not_the_learner(server: ServerProcess):
    mounts = Path("/proc/mounts").read_text()
    if str(server.home / "drafts") not in mounts:
        pytest.skip("this machine does not let the test mount a small disk")
    figures = under(server, chaos_faults.disk_full)
    quiet(figures)
    assert figures["activate"] in (200, 409)
    assert figures["activate_after"] == 200
    assert figures["same_learner"]


def test_a_killed_engine_comes_back_with_what_was_live(server: ServerProcess):
    figures = under(server, lambda s, load: chaos_faults.engine_killed(s, load, 1))
    assert figures["draft_after"] == figures["draft_before"]
    assert 200 in figures["ready"]
    assert 503 in figures["ready"]
    assert figures["cut"] + figures["turned_away"] > 0
    assert figures["cut"] <= CLIENTS
    assert figures["noticed_s"][0] < 2


def test_an_engine_does_not_come_back_with_a_damaged_version(server: ServerProcess):
    figures = under(server, chaos_faults.live_weights_damaged)
    assert figures["draft_after"] == figures["draft_before"] != figures["damaged"]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_a_disconnected_clients_request_is_aborted(server: ServerProcess, stream: bool, path: str):
    until(lambda: metric(server, "vllm:num_requests_running") == 0, "the engine to be idle", 60)
    before = metric(server, "vllm:generation_tokens_total")
    body = long_request(server, stream)
    if "chat" in path:
        body["messages"] = [{"role": "user", "content": body.pop("prompt")}]
    with httpx.Client(base_url=server.url, timeout=60.0, trust_env=False) as client:
        request = client.build_request(
            "POST", path, json=body, headers={"x-paceline-usage": "true"}, timeout=2.0
        )
        if stream:
            response = client.send(request, stream=True)
            next(response.iter_bytes())
            response.close()
        else:
            with pytest.raises(httpx.ReadTimeout):
                client.send(request)
    until(lambda: metric(server, "vllm:num_requests_running") == 0, "the engine to be idle", 60)
    assert metric(server, "vllm:generation_tokens_total") - before < LONG


def test_a_shutdown_drains_and_leaves_nothing_behind(server: ServerProcess):
    """The last test here: the server ends."""
    family = server.children()
    with Load(server, CLIENTS, max_tokens=8) as load:
        load.wait_for_served(CLIENTS, 60)
        begun = time.monotonic()
        os.killpg(server.pid, signal.SIGINT)  # as Ctrl-C in a terminal
        until(lambda: not server.alive, "the server to end", 60)
    _, alive = psutil.wait_procs(family, timeout=2)
    assert [p for p in alive if p.status() != psutil.STATUS_ZOMBIE] == []
    assert server.stop() == 0, server.tail()
    assert all(one.outcome != "lost" for one in load.sent if one.started < begun)
    assert any(one.outcome == "turned away" for one in load.sent)


LONG = 480
"""Tokens that take much longer than a client here waits."""


def long_request(server: ServerProcess, stream: bool) -> dict[str, Any]:
    return {
        "model": server.get("/v1/models").json()["data"][0]["id"],
        "prompt": "A long story: once", "max_tokens": LONG, "ignore_eos": True, "stream": stream,
    }  # fmt: skip


def metric(server: ServerProcess, name: str) -> float:
    """One of vLLM's."""
    lines = server.get("/metrics").text.splitlines()
    (line,) = [line for line in lines if line.startswith(name + "{")]
    return float(line.rsplit(" ", 1)[1])
