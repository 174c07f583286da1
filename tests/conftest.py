"""Fixtures of every test that needs the real model or a real server."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import hypothesis
import pytest
from openai import OpenAI

from clients.process import ServerProcess
from rlcore.home import Home
from rlcore.models import embedded_model as make_embedded_model
from rlcore.weights import WeightStore
from tests.e2e.tap import LearnerTap

hypothesis.settings.register_profile("paceline", deadline=None)  # the machine may be busy
hypothesis.settings.load_profile("paceline")

SPECULATIVE_TOKENS = 3

DRAFT_LAYERS = 28
"""Of the embedded model's 30: about half of its greedy drafts are accepted."""

SPAN_TOKENS = {"eagle3": 2048, "draft_model": 64}
"""The second server cuts spans after 64 tokens."""

KV_BLOCKS = 12
"""Of 128 tokens: the second server has to preempt when several requests grow."""

QUICK_LEARNING = [
    "--learning.checkpoint-interval-s", "2", "--learning.publish-interval-s", "600",
    "--learning.gate-tokens", "100", "--learning.heldout-share", "0.02",
    "--learning.batch-tokens", "256",
]  # fmt: skip
"""An update as soon as there is enough to learn from, and a checkpoint soon after."""

ONE_THREAD = {
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
}
"""Threads that wait for each other crawl where more processes run than there are cores."""


@pytest.fixture(scope="session")
def embedded_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The embedded model's folder. PACELINE_TEST_HOME, if set, keeps it from run to run."""
    kept = os.environ.get("PACELINE_TEST_HOME")
    home = Path(kept) if kept else tmp_path_factory.mktemp("models")
    return make_embedded_model(Home(home))


@dataclass(frozen=True)
class Served:
    """A running server with the test as its learner."""

    server: ServerProcess
    tap: LearnerTap | None
    target: Path
    method: str

    @property
    def model(self) -> str:
        return self.target.name

    @property
    def openai(self) -> OpenAI:
        return OpenAI(base_url=self.server.openai_url, api_key="none", timeout=120.0, max_retries=0)

    @property
    def store(self) -> WeightStore:
        (root,) = (self.server.home / "drafts").iterdir()
        return WeightStore(root)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """A test asks for one of the servers by the mark ``on_server``; pytest then groups by it."""
    mark = metafunc.definition.get_closest_marker("on_server")
    if mark is not None:
        metafunc.parametrize("served", mark.args, indirect=True, scope="session")


@pytest.fixture(scope="session")
def served(
    request: pytest.FixtureRequest,
    embedded_model: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Served]:
    """A float32 server of the embedded model. There is never more than one at a time.

    ``eagle3`` has a random head that drafts K tokens in every step, so most are rejected;
    ``draft_model`` drafts with the target's own first layers, cuts spans, and has little KV cache;
    ``learning`` has the learner of its own in place of the test's, and an untrained head; ``shipped``
    has its own learner too, is bfloat16, and begins with the shipped head.
    """
    import torch

    from learner.drafters.registry import DRAFTERS
    from learner.target import Target

    method = request.param
    folder = tmp_path_factory.mktemp(method)
    if method in ("learning", "shipped"):
        flags = ["--target", str(embedded_model), "--max-model-len", "512", *QUICK_LEARNING]
        flags += ["--draft", "none" if method == "learning" else "auto"]
        with ServerProcess(folder / "home", flags, env=ONE_THREAD, start_deadline_s=240) as server:
            yield Served(server, None, embedded_model, "eagle3")
        return
    target = Target.open(embedded_model)
    if method == "eagle3":
        drafter = DRAFTERS[method].build(target, vocab_size=4096)
        engine = ["--enable-auto-tool-choice", "--tool-call-parser", "hermes"]
    else:
        drafter = DRAFTERS[method].build(target, layers=DRAFT_LAYERS)
        engine = ["--num-gpu-blocks-override", str(KV_BLOCKS)]
    drafter.save(folder / "draft", torch.float32)
    with ExitStack() as stack:
        tap = stack.enter_context(LearnerTap())
        flags = [
            "--target", str(embedded_model),
            "--dtype", "float32",
            "--draft-method", method,
            "--speculation", "fixed",
            "--draft", str(folder / "draft"),
            "--speculative-tokens", str(SPECULATIVE_TOKENS),
            "--max-model-len", "1024",
            "--learner", tap.base,
            "--capture-span-tokens", str(SPAN_TOKENS[method]),
            "--", *engine,
        ]  # fmt: skip
        server = ServerProcess(folder / "home", flags, env=ONE_THREAD, start_deadline_s=240)
        stack.enter_context(server)
        tap.hello()
        yield Served(server, tap, embedded_model, method)
        assert tap.problems == []
