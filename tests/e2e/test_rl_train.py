"""A run of policy RL over two kills: of the engine that samples, and of the run itself."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from rlcore.checkpoint import load_checkpoint
from tests.conftest import ONE_THREAD
from tests.e2e import tiny

pytestmark = pytest.mark.slow

UPDATES = 9
GROUPS, GROUP_SIZE = 2, 4
STALENESS = 1
DEADLINE = 420.0
"""Seconds for each step of the story: starts of the server take most of it."""

SETTINGS = f"""
algorithm = "grpo"
updates = {UPDATES}
groups_per_update = {GROUPS}
group_size = {GROUP_SIZE}
max_off_policy_steps = {STALENESS}
concurrency = 8
evaluate_every = 4
evaluate_tasks = 4
checkpoint_every = 2
[recipe]
kl_coefficient = 0
[environment]
name = "tests.e2e.rewarding:Parity"
[sampling]
max_prompt_tokens = 64
max_tokens = 12
[optimiser]
lr = 1e-4
threads = 1
[engine]
dtype = "float32"
speculation = "fixed"
max_model_len = 128
"""


class Command:
    """``rl-train`` as a process of its own, and everything that it started."""

    def __init__(self, settings: Path, log: Path, *flags: str) -> None:
        program = "import sys; from rlcore.rl.command import console; sys.exit(console())"
        root = str(Path(__file__).parents[2])
        with open(log, "ab") as output:
            self._process = subprocess.Popen(
                [sys.executable, "-c", program, str(settings), *flags],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env={**os.environ, **ONE_THREAD, "PYTHONPATH": root},
                start_new_session=True,
            )
        self._log = log
        self.family: set[psutil.Process] = set()

    def until(self, true: Callable[[], Any]) -> Any:
        """What it gives once it is true; fails when the process ends or the time is up."""
        end = time.monotonic() + DEADLINE
        while not (value := true()):
            assert self._process.poll() is None, self._tail()
            assert time.monotonic() < end, self._tail()
            self._look()
            time.sleep(0.2)
        self._look()
        return value

    def child(self, word: str) -> psutil.Process:
        """The one that has this in its command line."""
        children = psutil.Process(self._process.pid).children()
        (found,) = [p for p in children if any(word in part for part in p.cmdline())]
        return found

    def kill(self) -> list[psutil.Process]:
        """SIGKILL to it alone; those of its family that are left after a while."""
        self._look()
        self._process.kill()
        self._process.wait()
        _, alive = psutil.wait_procs(self.family, timeout=60)
        return alive

    def wait(self) -> int:
        return self._process.wait(DEADLINE)

    def close(self) -> None:
        for process in {*self.family}:
            try:
                process.kill()
            except psutil.NoSuchProcess:
                continue
        self._process.kill()
        self._process.wait()

    def _look(self) -> None:
        try:
            self.family |= set(psutil.Process(self._process.pid).children(recursive=True))
        except psutil.NoSuchProcess:
            return

    def _tail(self) -> str:
        return "\n".join(self._log.read_text(errors="replace").splitlines()[-40:])


SERVER = "learn_drafts = false\n"
PROCESS = 'where = "process"\n'
ENGINE = {SERVER: "serve", PROCESS: "EngineCore"}
"""Where the engine is -> the process to kill."""


@dataclass
class Story:
    where: str
    out: Path
    base: Path
    swaps: list[dict[str, Any]] = field(default_factory=list)
    """Of the server that came back."""
    live_before: int = -1
    """Updates that were done when the server was killed."""
    left_over: list[psutil.Process] = field(default_factory=list)
    saved: int = -1
    """Version of the checkpoint that the run was resumed from."""
    code: int = -1


def lines(path: Path) -> list[dict[str, Any]]:
    """The whole lines of a file that may be being written."""
    text = path.read_text() if path.exists() else ""
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


def updates(out: Path) -> int:
    return max((line["update"] for line in lines(out / "trained.jsonl")), default=0)


def policy_of(server: psutil.Process) -> dict[str, Any]:
    words = server.cmdline()
    port = words[words.index("--port") + 1]
    answer: dict[str, Any] = httpx.get(
        f"http://127.0.0.1:{port}/v1/paceline/policy", timeout=60, trust_env=False
    ).json()
    return answer


@pytest.fixture(scope="module", params=[SERVER, PROCESS], ids=["server", "process"])
def story(
    request: pytest.FixtureRequest, embedded_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Story]:
    folder = tmp_path_factory.mktemp("rl-train")
    where: str = request.param
    story = Story(where, folder / "out", folder / "base")
    tokenizer = AutoTokenizer.from_pretrained(embedded_model)
    tiny.make_target(story.base, len(tokenizer))
    tokenizer.save_pretrained(story.base)
    settings, log = folder / "run.toml", folder / "rl-train.log"
    settings.write_text(f'model = "{story.base}"\nout = "{story.out}"\n{SETTINGS}{where}')
    first = Command(settings, log)
    try:
        first.until(lambda: updates(story.out) >= 2)
        first.child(ENGINE[where]).send_signal(signal.SIGKILL)
        story.live_before = updates(story.out)
        first.until(lambda: updates(story.out) >= story.live_before + 2)
        if where == SERVER:
            story.swaps = policy_of(first.child("serve"))["swaps"]
        story.left_over = first.kill()
    finally:
        first.close()
    found = load_checkpoint(story.out / "checkpoint")
    assert found is not None
    story.saved = found[1]["books"]["admission"]["version"]
    second = Command(settings, log, "--resume")
    try:
        story.code = second.wait()
        yield story
    finally:
        second.close()


def test_the_run_completes_with_a_policy_that_has_moved(story: Story) -> None:
    assert story.code == 0
    moved = AutoModelForCausalLM.from_pretrained(story.out / "policy", dtype=torch.float32)
    base = AutoModelForCausalLM.from_pretrained(story.base, dtype=torch.float32)
    assert not torch.equal(moved.lm_head.weight, base.lm_head.weight)
    assert AutoTokenizer.from_pretrained(story.out / "policy").chat_template


def test_a_killed_server_comes_back_with_the_version_that_was_live(story: Story) -> None:
    if story.where == PROCESS:
        pytest.skip("there is no server to ask")
    first = story.swaps[0]["version"]
    # the update before may have been on its way still, or the next one taken already
    assert story.live_before - 1 <= first <= story.live_before + 1
    assert [swap["version"] for swap in story.swaps] == list(range(first, first + len(story.swaps)))


def test_a_killed_run_leaves_no_process(story: Story) -> None:
    assert story.left_over == []


def test_every_update_is_there_once_with_its_figures(story: Story) -> None:
    metrics = [line for line in lines(story.out / "metrics.jsonl") if "grad_norm" in line]
    assert [line["update"] for line in metrics] == list(range(1, UPDATES + 1))
    assert all(0 <= line["staleness_max"] <= STALENESS for line in metrics)
    on_policy = [
        line["mismatch_kl_on_policy"] for line in metrics if "mismatch_kl_on_policy" in line
    ]
    assert on_policy, "some tokens must have been on policy"
    assert max(on_policy) < 1e-6
    assert any(line.get("acceptance_length", 0) >= 1 for line in metrics), "drafts are verified"
    said = (story.out.parent / "rl-train.log").read_text()
    assert said.count("is gone and is started again") == 1


def test_every_token_has_a_fate(story: Story) -> None:
    found = load_checkpoint(story.out / "checkpoint")
    assert found is not None
    ledger = found[1]["books"]["ledger"]
    waiting = sum(ledger["waiting"].values()) + sum(ledger["in_flight"].values())
    assert ledger["processed"] == sum(ledger["fates"].values()) + waiting
    assert ledger["fates"]["trained"] > 0


def test_no_group_is_skipped_or_trained_twice_over_the_kills(story: Story) -> None:
    assert 0 < story.saved < UPDATES, "the resume must have had something to do"
    trained = [int(name) for line in lines(story.out / "trained.jsonl") for name in line["groups"]]
    assert len(trained) == len(set(trained)) == UPDATES * GROUPS
    found = load_checkpoint(story.out / "checkpoint")
    assert found is not None
    order = found[1]["books"]["order"]
    pending = {*order["again"], *order["in_flight"], *order["finished"]}
    assert set(trained) | pending == set(range(order["cursor"]))
    assert not set(trained) & pending
