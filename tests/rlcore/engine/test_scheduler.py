"""The scheduler's account of its steps: every computing second once, no idle one; the tokens kept."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.v1.core.sched.scheduler import Scheduler

from rlcore.engine import scheduler as scheduler_module
from rlcore.engine.scheduler import PacelineScheduler
from rlcore.speculation.control import DraftControl
from rlcore.speculation.gain import Gain

DRAFTS = 3


@dataclass
class Request:
    num_computed_tokens: int
    num_prompt_tokens: int = 8
    num_output_tokens: int = 1
    max_tokens: int = 100


class Bench:
    """PacelineScheduler over a vLLM scheduler that does as it is told, on a clock that is set."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        self.unfinished = True
        self.finishing: list[str] = []
        self.kept: dict[str, int] = {}
        self._output: Any = None
        monkeypatch.setattr(
            scheduler_module, "time", SimpleNamespace(perf_counter=lambda: self.now)
        )
        monkeypatch.setattr(Scheduler, "schedule", lambda *_: self._output)
        monkeypatch.setattr(Scheduler, "has_unfinished_requests", lambda *_: self.unfinished)
        monkeypatch.setattr(Scheduler, "update_from_output", lambda *_: self._take())
        monkeypatch.setattr(Scheduler, "update_draft_token_ids", lambda *_: None)
        self.it = made = PacelineScheduler.__new__(PacelineScheduler)
        made.requests = {}
        made._timeable, made._adaptive, made._fixed = True, False, DRAFTS
        made._control, made._gain = DraftControl(DRAFTS, []), Gain()
        made._draft_version = made._drafts_now = 0
        made._step = made._timed = None

    def _take(self) -> None:
        for name, tokens in self.kept.items():
            self.it.requests[name].num_output_tokens += tokens
        for name in self.finishing:
            del self.it.requests[name]

    def step(self, decoding: Sequence[str], seconds: float, *, prompt: Sequence[str] = ()) -> None:
        """One step of these requests, as EngineCore runs it."""
        drafts = {name: [5] * DRAFTS for name in decoding}
        counts = dict.fromkeys(decoding, 1 + DRAFTS) | dict.fromkeys(prompt, 8)
        for name in decoding:
            self.it.requests.setdefault(name, Request(12)).num_computed_tokens = 20
        for name in prompt:
            self.it.requests[name] = Request(8)
        self._output = SimpleNamespace(
            num_scheduled_tokens=counts,
            total_num_scheduled_tokens=sum(counts.values()),
            scheduled_spec_decode_tokens=drafts,
            finished_req_ids=set(),
            num_spec_tokens_to_schedule=0,
        )
        output = self.it.schedule()
        self.now += seconds
        names = list(counts)
        sampled = SimpleNamespace(
            sampled_token_ids=[[1] * max(1, self.kept.get(name, 1)) for name in names],
            req_id_to_index={name: i for i, name in enumerate(names)},
        )
        self.it.update_from_output(output, sampled)
        proposed: Any = SimpleNamespace(
            version=0, rates=[], req_ids=names, draft_token_ids=[[5] * DRAFTS for _ in names]
        )
        self.it.update_draft_token_ids(proposed)


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Bench:
    return Bench(monkeypatch)


def computed(gain: Gain) -> float:
    return gain.seconds + gain.unknown_seconds


def test_every_computing_second_counts_once_and_an_idle_one_not(bench: Bench):
    bench.kept = {"a": 2, "b": 3}
    bench.step(["a", "b"], 0.05)
    bench.step(["a", "b"], 0.04)
    bench.unfinished = False
    bench.step(["a", "b"], 0.03)
    assert computed(bench.it._gain) == pytest.approx(0.12)
    bench.now += 60.0  # nothing to do
    bench.unfinished = True
    bench.step(["a", "b"], 0.05)
    bench.unfinished = False
    bench.step(["a", "b"], 0.05)
    assert computed(bench.it._gain) == pytest.approx(0.22)
    assert bench.it._gain.decode_steps == 5
    assert bench.it._gain.drafts == 15


def test_the_tokens_that_count_are_those_the_requests_kept(bench: Bench):
    """A request that stops within a step keeps fewer than were sampled."""
    bench.kept = {"a": 4, "b": 2}
    bench.finishing = ["b"]
    bench.unfinished = False
    bench.step(["a", "b"], 0.05)
    assert bench.it._gain.tokens == 6


def test_a_prompts_first_token_is_no_gain_and_its_time_is_compared_with_itself(bench: Bench):
    bench.kept = {"p": 1}
    bench.unfinished = False
    bench.step([], 0.2, prompt=["p"])
    gain = bench.it._gain
    assert (gain.tokens, gain.decode_steps) == (0, 0)
    assert gain.plain_seconds == gain.seconds == pytest.approx(0.2)


def test_a_pause_is_no_step(bench: Bench, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(Scheduler, "set_pause_state", lambda *_: None)
    bench.kept = {"a": 2}
    bench.step(["a"], 0.05)
    bench.it.set_pause_state(None)  # type: ignore[arg-type]
    bench.now += 5.0
    bench.unfinished = False
    bench.step(["a"], 0.05)
    assert computed(bench.it._gain) == pytest.approx(0.05)


def test_steps_that_overlap_are_not_timed(bench: Bench):
    bench.it._timeable = False
    bench.kept, bench.unfinished = {"a": 2}, False
    bench.step(["a"], 0.05)
    assert computed(bench.it._gain) == 0
    assert bench.it._drafts_now == DRAFTS
