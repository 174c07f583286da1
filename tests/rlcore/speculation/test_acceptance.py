"""Acceptance of the present traffic: by position, forgetting, and request by request."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlcore.speculation.acceptance import Acceptance


def serve(acceptance: Acceptance, rate: float, steps: int, request: str = "r", k: int = 3) -> None:
    draw = random.Random(steps)
    for _ in range(steps):
        accepted = 0
        while accepted < k and draw.random() < rate:
            accepted += 1
        acceptance.observe(request, k, accepted)


@pytest.mark.parametrize("rate", [0.1, 0.5, 0.9])
def test_rates_come_to_what_is_accepted_whatever_was_guessed(rate):
    for guess in (0.0, 1.0):
        acceptance = Acceptance([guess] * 3)
        serve(acceptance, rate, 2000)
        assert acceptance.chances(3) == pytest.approx([rate, rate**2, rate**3], abs=0.1)


def test_the_past_is_forgotten():
    acceptance = Acceptance([0.5] * 3)
    serve(acceptance, 0.9, 3000)
    serve(acceptance, 0.1, 1000)
    assert acceptance.chances(1)[0] < 0.2


def test_doubt_keeps_the_value_and_lets_few_trials_change_it():
    acceptance = Acceptance([0.5] * 3)
    serve(acceptance, 0.05, 3000)
    before = acceptance.chances(3)
    acceptance.fade()
    assert acceptance.chances(3) == pytest.approx(before)
    serve(acceptance, 1.0, 12)
    assert acceptance.chances(1)[0] > 0.4


def test_a_new_drafter_is_believed_what_its_manifest_says_until_it_is_seen():
    acceptance = Acceptance([0.5] * 3)
    serve(acceptance, 0.05, 3000)
    acceptance.restart([0.8, 0.7, 0.6])
    assert acceptance.chances(3) == pytest.approx([0.8, 0.56, 0.336])
    assert acceptance.skill("r") == 1.0


def test_a_request_that_fares_worse_than_the_traffic_is_known_for_it():
    acceptance = Acceptance([0.5] * 3)
    for turn in range(200):
        serve(acceptance, 0.8, 10, f"good-{turn % 9}")
        serve(acceptance, 0.0, 1, "bad")
    assert acceptance.skill("bad") < 0.5 < 0.8 < acceptance.skill("good-1")
    acceptance.forget(["bad"])
    assert acceptance.skill("bad") == 1.0


@given(
    st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 6), st.integers(0, 9)), max_size=300),
    st.integers(1, 5),
)
def test_chances_are_probabilities_that_fall_with_the_position(observed, positions):
    acceptance = Acceptance([0.5] * positions)
    for request, drafted, accepted in observed:
        acceptance.observe(request, drafted, accepted)
    chances = acceptance.chances(positions)
    assert len(chances) == positions
    assert all(1 >= a >= b >= 0 for a, b in zip([1.0, *chances], chances, strict=False))
    assert all(acceptance.skill(request) > 0 for request in "abcd")
