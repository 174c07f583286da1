"""The temperature follows entropy and groups: slowly, within its clamp, without going to and fro."""

from __future__ import annotations

import itertools
import json
import math
import random
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlcore.asynchrony.temperature import (
    COOLDOWN,
    LEAST,
    MOST,
    PERSISTENCE,
    REFERENCE_UPDATES,
    STEP,
    TemperatureControl,
    UpdateSample,
)
from rlcore.errors import UsageError

GOOD = UpdateSample(1.0, 12, 1, 2)
COLLAPSED = UpdateSample(0.1, 12, 5, 0)
SOLVED = UpdateSample(0.6, 12, 10, 0)
NOISE = UpdateSample(1.1, 12, 0, 11)
HOPELESS = UpdateSample(0.3, 12, 0, 11)

samples = st.builds(
    lambda entropy, right, wrong: UpdateSample(entropy, 12, right, min(wrong, 12 - right)),
    st.floats(0, 5) | st.just(math.nan),
    st.integers(0, 12),
    st.integers(0, 12),
)


def after(control: TemperatureControl, sample: UpdateSample, updates: int) -> float:
    for _ in range(updates):
        control.observe(sample)
    return control.temperature


def begun() -> TemperatureControl:
    control = TemperatureControl()
    assert after(control, GOOD, 20) == 1.0
    return control


@pytest.mark.parametrize(
    ("sample", "end"), [(COLLAPSED, MOST), (SOLVED, MOST), (NOISE, LEAST), (HOPELESS, 1.0)]
)
def test_each_cause_moves_it_its_way_up_to_the_clamp(sample, end):
    assert after(begun(), sample, 200) == end


def test_all_wrong_with_no_entropy_left_calls_for_more_of_it():
    assert after(begun(), UpdateSample(0.05, 12, 0, 12), 200) == MOST


def test_all_right_in_spite_of_much_noise_does_not_call_for_more():
    assert after(begun(), UpdateSample(2.0, 12, 10, 0), 200) == 1.0


def test_it_goes_back_to_the_start_when_all_is_well():
    control = begun()
    after(control, COLLAPSED, 60)
    assert control.temperature > 1.1
    assert after(control, GOOD, 100) == 1.0
    after(control, NOISE, 60)
    assert control.temperature < 0.9
    assert after(control, GOOD, 100) == 1.0


def test_a_cause_has_to_persist_and_changes_are_a_cooldown_apart():
    control = begun()
    decisions = [control.observe(COLLAPSED) for _ in range(60)]
    caused = [i for i, d in enumerate(decisions) if "entropy fell" in d.reason]
    changed = [i for i, d in enumerate(decisions) if d.changed]
    assert changed[0] == caused[0] + PERSISTENCE - 1
    assert {b - a for a, b in itertools.pairwise(changed)} == {COOLDOWN + 1}


def test_it_goes_back_step_by_step():
    control = begun()
    after(control, NOISE, 60)
    temperatures = [control.observe(GOOD).temperature for _ in range(100)]
    steps = [b - a for a, b in itertools.pairwise(temperatures) if a != b]
    assert steps == pytest.approx([STEP] * len(steps))


def test_between_the_thresholds_it_stays():
    control = begun()
    after(control, COLLAPSED, 60)
    held = control.temperature
    for between in (UpdateSample(0.4, 12, 1, 1), UpdateSample(1.0, 12, 5, 1)):
        after(control, between, 1)
        assert after(control, between, 60) == pytest.approx(held, abs=STEP)
    assert control.temperature > 1.1


def test_a_single_odd_update_changes_nothing():
    control = begun()
    for odd in (COLLAPSED, NOISE, SOLVED) * 3:
        control.observe(odd)
        assert after(control, GOOD, 8) == 1.0


@given(st.lists(samples, max_size=120), st.integers(0, 119))
def test_it_is_clamped_and_slow_and_a_resumed_one_is_the_same(script, killed_at):
    control = TemperatureControl()
    last_change, before = -COOLDOWN - PERSISTENCE, control.temperature
    for update, sample in enumerate(script):
        if update == killed_at:
            saved = json.loads(json.dumps(control.state()))
            control = TemperatureControl()
            control.load_state(saved)
        decision = control.observe(sample)
        assert LEAST <= decision.temperature <= MOST
        assert abs(decision.temperature - before) <= STEP + 1e-9
        assert decision.changed == (decision.temperature != before)
        if decision.changed:
            assert update >= REFERENCE_UPDATES
            assert update - last_change > COOLDOWN
            last_change, before = update, decision.temperature


def test_the_changes_do_not_depend_on_where_it_was_killed():
    script = [GOOD] * 10 + [COLLAPSED] * 30 + [GOOD] * 10 + [NOISE] * 30
    straight = TemperatureControl()
    expected = [straight.observe(sample) for sample in script]
    killed = TemperatureControl()
    found = []
    for sample in script:
        saved = json.loads(json.dumps(killed.state()))
        killed = TemperatureControl()
        killed.load_state(saved)
        found.append(killed.observe(sample))
    assert found == expected
    assert sum(decision.changed for decision in found) > 4


def run(entropy_of: Callable[[float, int], float], updates: int, seed: int) -> list[float]:
    """A policy whose entropy follows the temperature of the rollouts, which arrive 3 updates late."""
    draw = random.Random(seed)
    control = TemperatureControl()
    late = [1.0] * 3
    temperatures = []
    for update in range(updates):
        late.append(control.temperature)
        entropy = entropy_of(late[update], update) * draw.gauss(1, 0.1)
        chance = max(0.02, 0.6 - 0.6 * entropy)  # that a group is all right
        right = sum(draw.random() < chance for _ in range(12))
        control.observe(UpdateSample(entropy, 12, right, 0))
        temperatures.append(control.temperature)
    return temperatures


def turns(temperatures: list[float]) -> int:
    """Changes of direction."""
    moves = [b - a for a, b in itertools.pairwise(temperatures) if a != b]
    return sum(a * b < 0 for a, b in itertools.pairwise(moves))


@pytest.mark.parametrize("seed", range(5))
def test_a_collapse_is_answered_in_a_loop_without_oscillation(seed):
    def collapsing(temperature: float, update: int) -> float:
        return max(0.15, 1 - update / 60) * temperature**3

    temperatures = run(collapsing, 300, seed)
    assert temperatures[30] == 1.0
    assert min(temperatures[150:]) >= 1.1
    assert turns(temperatures) <= 2


@pytest.mark.parametrize("seed", range(5))
def test_a_healthy_run_is_left_alone(seed):
    temperatures = run(
        lambda temperature, update: max(0.6, 1 - update / 300) * temperature**3, 300, seed
    )
    assert temperatures == [1.0] * 300


def test_a_start_outside_the_clamp_is_refused():
    with pytest.raises(UsageError, match="not in"):
        TemperatureControl(1.5)


def test_an_update_that_says_nothing_is_left_out():
    control = begun()
    before = control.state()
    for sample in (UpdateSample(math.nan, 12, 0, 0), UpdateSample(0.0, 0, 0, 0)):
        assert control.observe(sample).reason == "nothing to judge by"
    assert control.state() == before
