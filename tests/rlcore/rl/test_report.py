"""The figures of an update."""

from __future__ import annotations

import time

import pytest

from rlcore.asynchrony.role_windows import RoleMeter
from rlcore.asynchrony.token_ledger import Fate, TokenLedger
from rlcore.generator.base import GeneratorStatus
from rlcore.records.trace import Sampling
from rlcore.rl.report import SAMPLES_SHOWN, Speedometer, samples, staleness
from rlcore.rl.rollouts import Roles
from rlcore.rollout import NOT_SAMPLED, Rollout


def a_rollout(name: str, versions: list[int]) -> Rollout:
    sampled = len(versions)
    return Rollout(
        rollout_id=name, task_id="t", group_id="g", token_ids=[1] * (sampled + 1), prompt_length=1,
        loss_mask=[False] + [True] * sampled, logprobs=[0.0] + [-1.0] * sampled,
        policy_versions=[NOT_SAMPLED, *versions], sampling=Sampling(), draft_version=0,
        finish_reason="stop", reward=0.0,
    )  # fmt: skip


def test_staleness_is_that_of_the_oldest_token():
    rollouts = [a_rollout("a", [3, 4]), a_rollout("b", [5]), a_rollout("c", [])]
    assert staleness([(rollouts, 5)]) == {"staleness": 1.0, "staleness_max": 2.0}
    assert staleness([([a_rollout("c", [])], 5)]) == {}


def test_few_samples_are_shown_and_from_all_over_the_batch():
    class Words:
        def decode(self, token_ids: list[int]) -> str:
            return "x" * len(token_ids)

    shown = samples([a_rollout(str(i), [0]) for i in range(100)], Words())
    assert [s["rollout"] for s in shown] == ["0", "25", "50", "75"]
    assert len(samples([a_rollout("a", [0])], Words())) == 1 <= SAMPLES_SHOWN


def a_speedometer() -> tuple[Speedometer, Roles, TokenLedger]:
    now = time.monotonic()
    roles = Roles(RoleMeter(now), RoleMeter(now), RoleMeter(now))
    ledger = TokenLedger()
    return Speedometer(roles, ledger), roles, ledger


def test_rates_are_of_the_time_since_the_figures_before():
    speed, _, ledger = a_speedometer()
    begun = time.monotonic()
    speed.begin(GeneratorStatus(0, 0, emitted=10, draft_steps=5, plain_steps=5))
    ledger.sampled("a", 40)
    ledger.finished("a")
    ledger.settled("a", {Fate.TRAINED: 30, Fate.ZERO_ADVANTAGE: 10})
    status = GeneratorStatus(1, 2, emitted=30, draft_steps=15, plain_steps=35)
    first = speed.figures(speed.window(begun + 10), status, begun + 10)
    assert first["effective_tokens_per_second"] == pytest.approx(3.0, rel=0.05)
    assert first["acceptance_length"] == 2.0
    assert first["drafted_steps"] == 0.25
    assert (first["tokens/trained"], first["tokens/zero_advantage"]) == (30, 10)
    second = speed.figures(speed.window(begun + 20), status, begun + 20)
    assert second["effective_tokens_per_second"] == 0.0
    assert "acceptance_length" not in second


def test_an_engine_that_was_restarted_gives_no_acceptance_for_that_update():
    speed, _, _ = a_speedometer()
    begun = time.monotonic()
    speed.begin(GeneratorStatus(0, 0, emitted=100, draft_steps=50, plain_steps=50))
    fresh = GeneratorStatus(0, 0, emitted=20, draft_steps=60, plain_steps=60)
    assert "acceptance_length" not in speed.figures(speed.window(begun + 1), fresh, begun + 1)


def test_what_was_before_the_run_began_is_in_no_window():
    made = time.monotonic() - 100
    roles = Roles(RoleMeter(made), RoleMeter(made), RoleMeter(made))
    speed = Speedometer(roles, TokenLedger())
    speed.begin(GeneratorStatus(0, 0))
    begun = time.monotonic()
    roles.trainer.working(1, begun)
    roles.trainer.done(50, begun + 10)
    trainer = speed.window(begun + 10).trainer
    assert (trainer.busy, trainer.throughput) == pytest.approx((1.0, 5.0), rel=0.05)
