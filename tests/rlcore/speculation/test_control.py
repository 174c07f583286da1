"""The number of drafts, driven by an engine that is a table of step times and an acceptance rate."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlcore.speculation.control import PROBE_STEPS, DraftControl

MOST = 3
TABLE = {  # milliseconds by batch size, for 0 to 3 drafts: measured on two cores, embedded model
    1: (33, 38, 39, 40),
    4: (34, 44, 54, 65),
    16: (65, 107, 139, 171),
    32: (126, 192, 268, 344),
}


class Engine:
    """Serves ``batch`` requests without end and counts what comes out."""

    def __init__(self, control: DraftControl, rate: float, seed: int = 0) -> None:
        self.control = control
        self.rate: Callable[[str], float] = lambda _: rate
        self.draw = random.Random(seed)
        self.verified: dict[str, int] = {}
        self.tokens = 0
        self.seconds = 0.0
        self.chosen: list[int] = []
        self.noise = 0.03
        self.slow = 1.0

    def step(self, batch: int) -> None:
        requests = [f"r{i}" for i in range(batch)]
        proposed = self.control.choose(requests)
        counts = [self.verified.get(r, 0) for r in requests]
        drafts = sum(counts) / batch
        low, high = TABLE[batch][int(drafts)], TABLE[batch][min(MOST, int(drafts) + 1)]
        seconds = (low + (high - low) * (drafts - int(drafts))) / 1000
        seconds *= self.slow * max(0.5, self.draw.gauss(1, self.noise))
        for request, count in zip(requests, counts, strict=True):
            accepted = 0
            while accepted < count and self.draw.random() < self.rate(request):
                accepted += 1
            self.tokens += accepted + 1
            if count:
                self.control.observe_drafts(request, count, accepted)
            self.verified[request] = self.control.limit(request, proposed, batch)
        if all(count == proposed for count in counts):
            self.control.observe_step(batch, proposed, seconds)
        self.seconds += seconds
        self.chosen.append(proposed)

    def run(self, batch: int, steps: int) -> float:
        """Tokens per second over these steps."""
        tokens, seconds = self.tokens, self.seconds
        for _ in range(steps):
            self.step(batch)
        return (self.tokens - tokens) / (self.seconds - seconds)


def fixed_rate(batch: int, drafts: int, rate: float) -> float:
    tokens = sum(rate**j for j in range(drafts + 1))
    return batch * tokens / TABLE[batch][drafts] * 1000


def best_fixed(batch: int, rate: float) -> float:
    return max(fixed_rate(batch, drafts, rate) for drafts in range(MOST + 1))


@pytest.mark.parametrize("batch", TABLE)
@pytest.mark.parametrize("rate", [0.0, 0.3, 0.5, 0.8])
def test_it_comes_to_the_best_number_and_stays_there(batch, rate):
    engine = Engine(DraftControl(MOST, []), rate)
    engine.run(batch, 400)
    reached = engine.run(batch, 3000)
    assert reached > 0.97 * best_fixed(batch, rate)
    assert reached > 0.97 * fixed_rate(batch, 0, rate)


def test_a_burst_is_left_and_come_back_from_within_a_step_once_it_is_known():
    engine = Engine(DraftControl(MOST, []), 0.45)  # drafting pays at 1, not at 32
    engine.run(1, 300)
    engine.run(32, 300)
    engine.run(1, 300)
    engine.chosen.clear()
    engine.run(32, 12)
    assert engine.chosen.count(0) >= 12 - PROBE_STEPS
    engine.chosen.clear()
    engine.run(1, 12)
    assert sum(drafts >= 2 for drafts in engine.chosen) >= 12 - PROBE_STEPS


def test_a_batch_size_never_seen_begins_without_drafts():
    control = DraftControl(MOST, [])
    engine = Engine(control, 0.7)
    engine.run(1, 300)
    assert control.choose([f"r{i}" for i in range(32)]) == 0


def test_it_does_not_flap_between_numbers_that_are_as_good():
    rate = 0.37  # at batch 1: 1, 2 and 3 drafts within 4 %
    engine = Engine(DraftControl(MOST, []), rate)
    engine.run(1, 500)
    engine.chosen.clear()
    engine.run(1, 2000)
    changes = sum(a != b for a, b in zip(engine.chosen, engine.chosen[1:], strict=False))
    assert changes < 2000 / PROBE_STEPS / 5


@pytest.mark.parametrize("batch", [1, 16])
def test_looking_at_what_is_worse_is_bounded(batch):
    engine = Engine(DraftControl(MOST, []), 0.0)
    engine.run(batch, 300)
    reached = engine.run(batch, 5000)
    assert reached > 0.98 * fixed_rate(batch, 0, 0.0)
    assert any(engine.chosen[-2000:])  # but it does look


def test_a_drafter_that_turned_bad_in_one_step_is_left_and_one_that_became_good_is_found():
    engine = Engine(DraftControl(MOST, []), 0.8)
    engine.run(1, 400)
    engine.rate = lambda _: 0.0
    engine.chosen.clear()
    engine.run(1, 400)
    assert engine.chosen.index(0) < 200
    assert sum(engine.chosen[-100:]) < 30
    engine.rate = lambda _: 0.8
    engine.chosen.clear()
    engine.run(1, 3000)
    assert engine.chosen.count(MOST) > 1500


def test_a_new_version_is_drafted_with_at_once_and_an_untrained_one_is_not():
    control = DraftControl(MOST, [0.0] * MOST)
    engine = Engine(control, 0.0)
    engine.run(1, 300)
    assert sum(engine.chosen[-100:]) < 30
    control.new_drafter([0.8, 0.8, 0.8])
    engine.rate = lambda _: 0.8
    engine.chosen.clear()
    engine.run(1, 60)
    assert engine.chosen.count(MOST) > 30


def test_a_request_whose_drafts_are_rejected_gets_fewer_in_a_large_batch():
    engine = Engine(DraftControl(MOST, []), 0.9)
    engine.rate = lambda request: 0.0 if request == "r3" else 0.95
    engine.run(4, 600)
    control = engine.control
    assert control.limit("r3", MOST, 4) < control.limit("r1", MOST, 4) == MOST
    assert control.limit("r3", MOST, 1) == MOST  # alone there is nothing to be saved


def test_a_machine_that_slows_down_changes_nothing():
    engine = Engine(DraftControl(MOST, []), 0.7)
    engine.run(1, 300)
    engine.slow = 2.5
    engine.chosen.clear()
    engine.run(1, 300)
    assert engine.chosen.count(MOST) > 250


@settings(max_examples=50)
@given(
    st.lists(
        st.tuples(
            st.integers(0, 40),
            st.sampled_from([0.0, -1.0, 1e-9, 0.02, 5.0, float("nan"), float("inf")]),
            st.integers(0, 5),
            st.integers(0, 5),
        ),
        max_size=200,
    )
)
def test_whatever_it_is_told_it_answers_with_a_number_of_drafts(events):
    control = DraftControl(MOST, [])
    for batch, seconds, drafted, accepted in events:
        requests = [f"r{i}" for i in range(batch)]
        chosen = control.choose(requests)
        assert 0 <= chosen <= MOST
        for request in requests[:3]:
            assert 0 <= control.limit(request, chosen, batch) <= chosen
            control.observe_drafts(request, drafted, accepted)
        control.observe_step(batch, chosen, seconds)
        control.finished(requests[:1])


def test_a_number_that_is_never_measured_is_given_up():
    """Half of the requests have grammars that refuse every draft: no step is pure."""
    control = DraftControl(MOST, [])
    requests = [f"r{i}" for i in range(16)]
    chosen = []
    for _ in range(2000):
        drafts = control.choose(requests)
        chosen.append(drafts)
        for request in requests:
            control.observe_drafts(request, drafts, drafts)
        control.observe_step(16, 0 if drafts == 0 else None, TABLE[16][drafts] / 1000)
    assert sum(chosen[-1000:]) < 100


def test_a_first_cost_measured_far_too_high_is_found_out():
    engine = Engine(DraftControl(MOST, []), 0.8)
    for _ in range(3):
        engine.control.observe_step(1, 1, 0.4)
    engine.run(1, 4000)
    engine.chosen.clear()
    engine.run(1, 500)
    assert engine.chosen.count(MOST) > 400


def test_a_slow_model_comes_back_from_nothing_too():
    engine = Engine(DraftControl(MOST, []), 0.8)
    engine.slow = 20.0  # most of a second for a step
    engine.run(1, 200)
    engine.rate = lambda _: 0.0
    engine.run(1, 400)
    engine.rate = lambda _: 0.8
    engine.run(1, 4000)
    engine.chosen.clear()
    engine.run(1, 500)
    assert engine.chosen.count(MOST) > 400


def test_drafting_that_became_dear_is_given_up_though_nothing_else_changed():
    engine = Engine(DraftControl(MOST, []), 0.7)
    engine.run(4, 400)
    before = dict(TABLE)
    TABLE[4] = (34, 100, 130, 160)
    try:
        engine.run(4, 3000)
        engine.chosen.clear()
        engine.run(4, 500)
    finally:
        TABLE.update(before)
    assert engine.chosen.count(0) > 400


def test_a_request_that_became_good_is_drafted_for_again():
    engine = Engine(DraftControl(MOST, []), 0.9)
    engine.rate = lambda request: 0.0 if request == "r3" else 0.95
    engine.run(4, 600)
    engine.rate = lambda _: 0.95
    engine.run(4, 150)
    assert engine.control.limit("r3", MOST, 4) == MOST


def test_a_cost_of_slower_days_is_measured_again():
    """Plain steps took five times as long when they were last measured; they are looked at all the same."""
    control, proposed = DraftControl(1, [0.9]), 0
    for _ in range(40):
        control.observe_step(1, 0, 0.1)
    for _ in range(1500):
        verified, proposed = proposed, control.choose(["a"])
        if verified:
            control.observe_drafts("a", 1, 1)
        control.observe_step(1, proposed if verified == proposed else None, 0.02 + 0.004 * proposed)
    known = control.cost.seconds(1, 0)
    assert known is not None
    assert known < 0.025
