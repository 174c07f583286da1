"""The bench's runner, with small servers in place of real ones and a sleeping process as learner."""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import httpx
import psutil
import pytest
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, PlainTextResponse, Response

from clients.bench.arrivals import Burst, arrival_times, with_bursts
from clients.bench.command import parse
from clients.bench.common import BenchError
from clients.bench.plan import Block, plan
from clients.bench.runner import Runner
from clients.bench.samples import Sample
from clients.process import ServerFailed
from clients.workload import Prompt
from tests.clients.stub import COUNT, Stub, running
from tests.clients.test_bench_plan import phase


class FakeServer(Stub):
    """A server of either kind; every answered request promotes one version."""

    def __init__(self, learner: psutil.Process | None = None) -> None:
        super().__init__()
        self.app = FastAPI()
        self.app.get("/v1/models")(self.models)
        self.app.post("/v1/chat/completions", response_model=None)(self.answer)
        self.app.get("/metrics")(self.metrics)
        self.app.get("/v1/paceline/status")(self.state)
        self.warm_ups: list[dict[str, Any]] = []
        self.alive = True
        self.child = learner

    @property
    def openai_url(self) -> str:
        return self.url

    async def answer(self, request: Request) -> Response:
        body = await request.json()
        if body.get("stream"):
            return await self.chat(request)
        self.warm_ups.append({**body, "learn": request.headers.get("x-paceline-learn")})
        return JSONResponse(
            {
                "id": "w",
                "object": "chat.completion",
                "created": 0,
                "model": "stub",
                "choices": [
                    {
                        "index": 0,
                        "finish_reason": "stop",
                        "message": {"role": "assistant", "content": "hi"},
                    }
                ],
            }
        )

    async def metrics(self) -> PlainTextResponse:
        drafts = 2 * len(self.bodies)
        return PlainTextResponse(
            f'vllm:spec_decode_num_drafts_total{{e="0"}} {drafts}\n'
            f'vllm:spec_decode_num_accepted_tokens_total{{e="0"}} {drafts // 2}\n'
        )

    async def state(self) -> dict[str, Any]:
        return {"draft": {"live": len(self.bodies)}, "learner": {}, "traces": {}}

    def get(self, path: str) -> httpx.Response:
        return httpx.get(self.url.removesuffix("/v1") + path, trust_env=False)

    def cpu_seconds(self) -> float:
        return 0.0

    def learner(self) -> psutil.Process | None:
        return self.child

    def tail(self) -> str:
        return "its last words"


@pytest.fixture
def learner() -> Iterator[psutil.Process]:
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    yield psutil.Process(process.pid)
    process.kill()
    process.wait(10)


@pytest.fixture
def servers(learner: psutil.Process) -> Iterator[dict[str, FakeServer]]:
    made = {"none": FakeServer(), "frozen": FakeServer(), "online": FakeServer(learner)}
    with ExitStack() as stack:
        for server in made.values():
            stack.enter_context(running(server))
        yield made


def options(**given: object) -> argparse.Namespace:
    args = parse(["--phase", "a.jsonl", "--max-tokens", "7"])
    return argparse.Namespace(**(vars(args) | {"poll": 0.02, "deadline": 5.0} | given))


def run(
    servers: dict[str, FakeServer], blocks: list[Block], learner: psutil.Process, **given: object
) -> tuple[Runner, list[tuple[str, bool, bool]]]:
    """The runner, and of each sample: mode, measured, was the learner stopped meanwhile?"""
    seen: list[tuple[str, bool, bool]] = []

    def note(sample: Sample) -> None:
        stopped = learner.status() == psutil.STATUS_STOPPED
        seen.append((sample.mode, sample.measured, stopped))

    runner = Runner(options(**given), servers, note)  # type: ignore[arg-type]
    runner.run(blocks)
    return runner, seen


def blocks_of(count: int = 6, measure: int = 2, **given: Any) -> list[Block]:
    texts = [Prompt(f"p{i}", (f"go {'w ' * 3}{i}",)) for i in range(count)]
    made = phase("A", count)
    made = type(made)(made.name, (), tuple(texts))
    return plan(
        [made],
        ["none", "frozen", "online"],
        size=2,
        measure=measure,
        every=2,
        concurrency=1,
        **given,
    )


def test_every_server_gets_the_planned_prompts_once(
    servers: dict[str, FakeServer], learner: psutil.Process
) -> None:
    blocks = blocks_of()
    runner, _ = run(servers, blocks, learner)
    for mode, server in servers.items():
        sent = [body["messages"][-1]["content"] for body in server.bodies]
        wanted = [p.turns[0] for b in blocks if mode in b.modes for p in b.prompts]
        assert sent == wanted
        assert [w["learn"] for w in server.warm_ups] == ["false", "false"]
    assert len(servers["online"].bodies) == 6
    assert len(servers["none"].bodies) == 4
    assert [(s.block, s.mode) for s in runner.samples] == [
        (b.number, mode) for b in blocks for mode in b.modes
    ]
    assert runner.samples[-1].lead_tokens == sum(
        s.output_tokens for s in runner.samples if s.mode == "online"
    )


def test_lengths_come_from_usage_or_from_vllms_metrics(
    servers: dict[str, FakeServer], learner: psutil.Process
) -> None:
    runner, _ = run(servers, blocks_of(), learner)
    for sample in runner.samples:
        expected = 1.5 if sample.mode == "none" else 2.5
        assert sample.acceptance_length == expected
        assert sample.steps == 4


def test_the_learner_runs_only_beside_its_own_server(
    servers: dict[str, FakeServer], learner: psutil.Process
) -> None:
    _, seen = run(servers, blocks_of(), learner)
    assert seen
    assert all(stopped == (mode != "online") for mode, _, stopped in seen)
    assert learner.status() != psutil.STATUS_STOPPED


def test_a_quiet_measurement_stops_the_learner_for_everyone(
    servers: dict[str, FakeServer], learner: psutil.Process
) -> None:
    _, seen = run(servers, blocks_of(), learner, quiet_measure=True, learner_always=True)
    assert all(stopped == measured for _, measured, stopped in seen)
    assert learner.status() != psutil.STATUS_STOPPED


def test_swaps_are_seen_while_online_serves(
    servers: dict[str, FakeServer], learner: psutil.Process
) -> None:
    runner, _ = run(servers, blocks_of(), learner)
    lives = [reading.live for reading in runner.readings]
    assert None not in lives
    assert lives == sorted(lives)
    assert len(set(lives)) > 1
    tokens = [reading.tokens for reading in runner.readings]
    assert tokens == sorted(tokens)


def test_a_failed_request_is_counted_and_a_dead_server_ends_the_run(
    servers: dict[str, FakeServer], learner: psutil.Process
) -> None:
    mixed = Block(0, "A", True, ("none",), (Prompt("a", ("go on",)), Prompt("b", ("refuse",))), 1)
    runner, _ = run(servers, [mixed], learner)
    assert (runner.samples[0].failed, runner.samples[0].requests) == (1, 2)
    refused = Block(0, "A", True, ("none",), (Prompt("b", ("refuse",)),), 1)
    with pytest.raises(BenchError, match="no request of a block was served by none"):
        run(servers, [refused], learner)
    servers["none"].alive = False
    with pytest.raises(ServerFailed, match="the none server ended"):
        run(servers, [mixed], learner)
    assert learner.status() != psutil.STATUS_STOPPED


def test_a_block_is_sent_at_its_own_concurrency(
    servers: dict[str, FakeServer], learner: psutil.Process
) -> None:
    frozen = servers["frozen"]
    for number, level in enumerate((3, 1)):
        frozen.most_running = 0
        prompts = tuple(phase("pause w w w", 6).prompts)
        block = Block(number, "A", True, ("frozen",), prompts, level)
        runner, _ = run(servers, [block], learner)
        assert frozen.most_running == level
        (sample,) = runner.samples
        assert (sample.concurrency, sample.drafted) == (level, 6 * sum(COUNT["drafted"]))


def test_bursts_come_at_once_between_other_arrivals(
    servers: dict[str, FakeServer], learner: psutil.Process
) -> None:
    block = Block(0, "A", True, ("none",), tuple(phase("go", 9).prompts), 1)
    runner, _ = run(servers, [block], learner, rate=10.0, burst=Burst(4, 0.3))
    starts = sorted(r.started for r in runner.records[0].records)
    wanted = with_bursts(arrival_times(9, 10.0, 0, 0), Burst(4, 0.3))
    assert [at - starts[0] for at in starts] == pytest.approx(wanted, abs=0.15)


def test_requests_arrive_at_their_times(
    servers: dict[str, FakeServer], learner: psutil.Process
) -> None:
    block = Block(0, "A", True, ("none", "frozen"), tuple(phase("go", 8).prompts), 1)
    runner, _ = run(servers, [block], learner, rate=20.0)
    starts = {
        part.mode: sorted(r.started - part.records[0].started for r in part.records)
        for part in runner.records
    }
    assert starts["none"] == pytest.approx(starts["frozen"], abs=0.15)
    assert 0.1 < starts["none"][-1] - starts["none"][0] < 3
