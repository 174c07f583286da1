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

from clients.bench.command import main, parse
from clients.bench.common import BenchError
from clients.bench.modes import check_draft, chosen_modes, make_server
from clients.bench.plan import Block, plan
from clients.bench.runner import Runner
from clients.bench.samples import Sample
from clients.process import ServerFailed, ServerProcess
from clients.workload import Prompt
from tests.clients.stub import Stub, running
from tests.clients.test_bench_plan import phase, write


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
    return plan([made], ["none", "frozen", "online"], size=2, measure=measure, every=2, **given)


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
    mixed = Block(0, "A", True, ("none",), (Prompt("a", ("go on",)), Prompt("b", ("refuse",))))
    runner, _ = run(servers, [mixed], learner)
    assert (runner.samples[0].failed, runner.samples[0].requests) == (1, 2)
    refused = Block(0, "A", True, ("none",), (Prompt("b", ("refuse",)),))
    with pytest.raises(BenchError, match="no request of a block was served by none"):
        run(servers, [refused], learner)
    servers["none"].alive = False
    with pytest.raises(ServerFailed, match="the none server ended"):
        run(servers, [mixed], learner)
    assert learner.status() != psutil.STATUS_STOPPED


def test_requests_arrive_at_their_times(
    servers: dict[str, FakeServer], learner: psutil.Process
) -> None:
    block = Block(0, "A", True, ("none", "frozen"), tuple(phase("go", 8).prompts))
    runner, _ = run(servers, [block], learner, rate=20.0)
    starts = {
        part.mode: sorted(r.started - part.records[0].started for r in part.records)
        for part in runner.records
    }
    assert starts["none"] == pytest.approx(starts["frozen"], abs=0.15)
    assert 0.1 < starts["none"][-1] - starts["none"][0] < 3


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--modes", "none,fast"], "there are none, ngram, suffix, frozen, online"),
        (["--modes", "none,none"], "twice"),
        (["--modes", "none,frozen"], "needs --draft FOLDER"),
        (["--modes", "online", "--draft", "nowhere"], "no safetensors"),
        (["--modes", "none", "--measure", "9"], "fewer than --measure 9"),
        (["--modes", "none", "--target", "nowhere"], "give 'embedded' or a Hugging Face"),
    ],
)
def test_a_mistake_is_one_line_before_anything_starts(
    tmp_path: Any, capsys: pytest.CaptureFixture[str], words: list[str], said: str
) -> None:
    file = write(tmp_path / "a.jsonl", *(f"prompt {i}" for i in range(8)))
    assert main(["--phase", str(file), "--measure", "4", *words]) == 2
    error = capsys.readouterr().err.strip()
    assert error.startswith("paceline: ")
    assert said in error
    assert len(error.splitlines()) == 1


@pytest.mark.parametrize("words", [["--concurrency", "0"], ["--rate", "-1"], ["--measure", "0"]])
def test_impossible_numbers_are_refused(words: list[str]) -> None:
    with pytest.raises(SystemExit):
        parse(["--phase", "a.jsonl", *words])


def test_a_home_with_earlier_traffic_is_refused(tmp_path: Any) -> None:
    (tmp_path / "drafts").mkdir()
    with pytest.raises(SystemExit):
        parse(["--phase", "a.jsonl", "--home", str(tmp_path)])


def test_suffix_without_its_package_is_left_out_with_a_line(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("clients.bench.modes.find_spec", lambda name: None)
    names, skipped = chosen_modes("none,suffix,online")
    assert names == ["none", "online"]
    assert len(skipped) == 1
    assert "arctic-inference" in skipped[0]
    with pytest.raises(BenchError, match="arctic-inference"):
        chosen_modes("suffix")


def test_all_servers_get_the_same_engine_flags(tmp_path: Any) -> None:
    words = [
        "--phase",
        "a.jsonl",
        "--draft",
        "d",
        "--",
        "--learning.seed",
        "3",
        "--",
        "--max-model-len",
        "512",
    ]
    args = parse(words)
    made = {
        mode: make_server(mode, args, tmp_path / mode, tmp_path / "target")
        for mode in ("none", "ngram", "suffix", "frozen", "online")
    }
    for server in made.values():
        flags = server.flags
        assert flags[flags.index("--kv-cache-memory-bytes") + 1] == str(2**29)
        assert flags[flags.index("--max-num-seqs") + 1] == "32"
        assert flags[flags.index("--max-model-len") + 1] == "512"
        assert str(tmp_path / "target") in flags
    for mode, learner in (("frozen", "off"), ("online", "local")):
        flags = made[mode].flags
        ours, engine = flags[: flags.index("--")], flags[flags.index("--") + 1 :]
        assert ours[ours.index("--learner") + 1] == learner
        assert ours[-2:] == ["--learning.seed", "3"]
        assert "--max-model-len" in engine
    assert "--speculative-config" not in made["none"].flags
    assert '"ngram"' in made["ngram"].flags[-1]
    assert '"suffix"' in made["suffix"].flags[-1]
    assert "--home" not in made["none"].command()
    assert isinstance(made["none"], ServerProcess)


def test_an_untrained_draft_is_no_frozen_one(tmp_path: Any) -> None:
    check_draft("none", ["none", "online"])
    (tmp_path / "model.safetensors").touch()
    check_draft(str(tmp_path), ["frozen"])
