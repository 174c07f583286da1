"""The server's policy route, as rl-train uses it: in the middle of requests, over HTTP.

The engine is compiled here; in ``test_policy_swap`` and ``test_rl_train`` it is not.
"""

from __future__ import annotations

import hashlib
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from clients.process import ServerProcess
from learner.drafters.eagle3 import Eagle3
from learner.target import Target
from rlcore.records.trace import check_trace
from tests.conftest import ONE_THREAD, Served
from tests.e2e.tap import LearnerTap

torch.set_num_threads(1)

pytestmark = pytest.mark.slow

PROMPTS = [[1000 + 7 * i for i in range(30)], [2000 + 3 * i for i in range(45)]]
TOKENS = 240
"""Enough for two swaps to fall among them."""


def perturbed(served: Path, folder: Path) -> list[Path]:
    """Two policies that learning could have led to, as transformers saves them."""
    model = AutoModelForCausalLM.from_pretrained(served, dtype=torch.float32)
    folders = []
    for seed in (1, 2):
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter *= 1 + 0.03 * torch.randn(parameter.shape, generator=generator)
        folders.append(folder / f"policy-{seed}")
        model.save_pretrained(folders[-1])
    return folders


def publish(served: Served, checkpoint: Path, version: int, **changes: Any) -> Any:
    with open(checkpoint / "model.safetensors", "rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    body = {"folder": str(checkpoint), "version": version, "sha256": digest} | changes
    return served.server.post("/v1/paceline/policy", json=body)


def complete(served: Served, **settings: Any) -> Any:
    return served.openai.completions.create(
        model=served.model, prompt=PROMPTS, temperature=1.0, seed=3, n=2, max_tokens=TOKENS, logprobs=1,
        extra_body={"return_token_ids": True, "ignore_eos": True, **settings},
        extra_headers={"x-paceline-policy-versions": "true"},
    )  # fmt: skip


def logprobs_of(model: Any, prompt: list[int], output: list[int]) -> list[float]:
    ids = torch.tensor([prompt + output])
    with torch.no_grad():
        every = model(ids).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
    return every.gather(1, ids[0, len(prompt) :, None]).flatten().tolist()


def test_requests_go_on_through_new_policies_and_each_token_says_which_one_sampled_it(
    embedded_model, tmp_path
):
    folders = [embedded_model, *perturbed(embedded_model, tmp_path)]
    Eagle3.build(Target.open(embedded_model), vocab_size=4096).save(tmp_path / "draft")
    with LearnerTap() as tap:
        flags = [
            "--target", str(embedded_model), "--dtype", "float32", "--speculation", "fixed",
            "--draft", str(tmp_path / "draft"), "--max-model-len", "512", "--learner", tap.base,
            "--cores", "1", "--no-enforce-eager",
        ]  # fmt: skip
        server = ServerProcess(tmp_path / "home", flags, env=ONE_THREAD, start_deadline_s=480)
        with server, ThreadPoolExecutor(2) as pool:
            served = Served(server, tap, embedded_model, "eagle3")
            assert tap.hello().target_sha256 == ""
            answer = pool.submit(complete, served)
            begun = threading.Event()
            pool.submit(wait_until_running, served, begun)
            assert begun.wait(60)
            assert publish(served, folders[1], 4).status_code == 200
            assert publish(served, folders[2], 7).status_code == 200
            check(served, answer.result(120), dict(zip((0, 4, 7), folders, strict=True)))
            check_refusals(served, folders)
            check_the_learner_is_told(tap, folders[2])
            check_cores_move(served)


def wait_until_running(served: Served, begun: threading.Event) -> None:
    while not generated(served):
        time.sleep(0.02)
    begun.set()


def generated(served: Served) -> float:
    lines = served.server.get("/metrics").text.splitlines()
    counts = [x for x in lines if x.startswith("vllm:generation_tokens_total")]
    return sum(float(x.rsplit(" ", 1)[1]) for x in counts)


def check(served: Served, answer: Any, folders: dict[int, Path]) -> None:
    models = {
        version: AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        for version, folder in folders.items()
    }
    spans = answer.usage.model_extra["paceline"]["policy_versions"]
    assert len(answer.choices) == len(spans) == 4
    seen = set()
    emitted: dict[tuple[int, ...], list[int]] = {}
    for choice, starts in zip(answer.choices, spans, strict=True):
        output, got = choice.model_extra["token_ids"], choice.logprobs.token_logprobs
        versions: list[int] = []
        for start, version in starts:
            versions[start:] = [version] * (TOKENS - start)
        assert len(output) == len(got) == len(versions) == TOKENS
        prompt = PROMPTS[choice.index // 2]
        under = {v: logprobs_of(model, prompt, output) for v, model in models.items()}
        for at, version in enumerate(versions):
            assert got[at] == pytest.approx(under[version][at], abs=1e-3), (choice.index, at)
        seen |= set(versions)
        emitted[tuple(output)] = versions
    assert seen == {0, 4, 7}
    check_traces(served, answer.id, emitted)


def check_traces(served: Served, name: str, emitted: dict[tuple[int, ...], list[int]]) -> None:
    """Spans end at a swap; what a span emitted was sampled by its version, or is the token that it
    shares with the next one."""
    assert served.tap is not None
    requests = served.tap.by_request(name, 4 * TOKENS)
    assert len(requests) == 4
    for spans in requests.values():
        for captured in spans:
            check_trace(captured.trace)
        ids = [i for captured in spans for i in captured.trace.emitted_ids()]
        versions = [c.trace.target_version for c in spans for _ in c.trace.emitted_ids()]
        assert versions == emitted[tuple(ids)]


def check_refusals(served: Served, folders: list[Path]) -> None:
    def greedy() -> str:
        found = served.openai.completions.create(
            model=served.model, prompt="The sea is", max_tokens=12, temperature=0.0
        )
        return found.choices[0].text

    before = greedy()
    for words, answer in {
        "version 7 is live": publish(served, folders[1], 7),
        "not the file": publish(served, folders[1], 8, sha256="0" * 64),
        "holds no model.safetensors": publish(served, folders[1], 8, folder="/nowhere"),
    }.items():
        assert answer.status_code == 409
        assert words in answer.json()["error"]["message"]
    assert greedy() == before
    status = served.server.status()
    assert status["target"]["version"] == 7
    assert status["policy_swaps"]["count"] == 2
    assert status["policy_swaps"]["failed"] == {"old": 1, "digest": 1, "unreadable": 1}
    live = served.server.get("/v1/paceline/policy").json()
    assert [swap["version"] for swap in live["swaps"]] == [4, 7]
    assert all(0 < swap["apply_seconds"] < swap["stall_seconds"] for swap in live["swaps"])
    assert live["swaps"][0]["frozen_requests"] == 4


def check_cores_move(served: Served) -> None:
    """--cores won over the environment's one thread, so that there is room for more."""
    server, usable = served.server, served.server.status()["cores"]["usable"]
    assert reported(served, 1) == {"usable": usable, "allotted": 1, "threads": 1}
    answer = server.post("/v1/paceline/cores", json={"cores": usable + 1})
    assert answer.status_code == 409
    assert f"1 to {usable}" in answer.json()["error"]["message"]
    for cores in (usable, 1, usable, 1):
        answer = server.post("/v1/paceline/cores", json={"cores": cores})
        found = {"usable": usable, "allotted": cores, "threads": cores}
        assert (answer.status_code, answer.json()) == (200, found)
        assert complete(served).usage.completion_tokens == 4 * TOKENS
        assert reported(served, cores) == found, "after steps too"


def reported(served: Served, threads: int) -> dict[str, int]:
    """What the status says of cores, once the engine's report is so, or after ten seconds."""
    end = time.monotonic() + 10
    time.sleep(1.5)  # a report that was begun before
    while served.server.status()["cores"]["threads"] != threads and time.monotonic() < end:
        time.sleep(0.2)
    cores: dict[str, int] = served.server.status()["cores"]
    return cores


def check_the_learner_is_told(tap: LearnerTap, folder: Path) -> None:
    end = time.monotonic() + 10
    while tap.hellos[-1].target_version != 7 and time.monotonic() < end:
        time.sleep(0.05)
    assert tap.hellos[-1].target_version == 7
    assert len(tap.hellos[-1].target_sha256) == 64
    message, frames = tap.target(7)
    assert [spec.name for spec in message.tensors] == ["embedding", "final_norm"]
    got = torch.frombuffer(bytearray(frames[0]), dtype=torch.float32)
    assert torch.equal(got, Target.open(folder).embedding.flatten())
    assert tap.target(4)[0].error == "version 7 is live"
