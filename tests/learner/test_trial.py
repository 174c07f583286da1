"""One bad version leads to one order to go back, however the messages about it come."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from learner import trial as trial_module
from learner.drafters.base import Drafter
from learner.live import LiveDraft
from learner.shadow import PairedSteps
from learner.trial import Trial
from tests.learner.made_spans import span

WORSE = PairedSteps(tokens=40, live=40, other=12.0)
NO_DRAFTER: Drafter = None  # type: ignore[assignment]
OLD, NEW = (LiveDraft(version, f"digest {version}", NO_DRAFTER) for version in (2, 3))


@pytest.fixture(autouse=True)
def every_span_is_bad_for_the_live_version(monkeypatch):
    monkeypatch.setattr(trial_module, "shadow", lambda *_: WORSE)


def failing() -> Trial:
    trial = Trial(NEW, OLD, 3)
    for number in range(500):
        trial.observe(replace(span(number, 40), request_id=f"r{number}"))
    assert trial.order() is not None
    return trial


def test_an_order_is_given_until_the_server_has_left_the_version():
    trial = failing()
    order = trial.order()
    assert order is not None
    assert (order.version, order.to) == (3, 2)
    trial.serves(3)
    assert trial.order() == order
    trial.serves(2)
    assert trial.order() is None
    assert trial.failed


@given(st.lists(st.one_of(st.just("span"), st.integers(2, 5)), max_size=20))
def test_no_message_brings_back_an_order_that_is_done_with(events):
    trial = failing()
    trial.serves(2)
    for number, event in enumerate(events):
        if event == "span":
            trial.observe(span(f"late{number}", 40))
        else:
            trial.serves(int(event))
        assert trial.order() is None


def test_a_version_that_somebody_chose_again_is_learned_on_from():
    trial = failing()
    trial.serves(2)
    trial.serves(3)
    assert not trial.failed
    assert trial.order() is None
    assert not trial.leads_to(OLD)


def test_only_the_very_weights_that_were_ordered_are_gone_back_to():
    trial = failing()
    assert trial.leads_to(OLD)
    assert not trial.leads_to(replace(OLD, sha256="another home's"))
    assert not trial.leads_to(NEW)


def test_a_version_that_is_not_on_trial_is_never_left():
    trial = Trial(OLD, None, 3)
    for number in range(500):
        trial.observe(span(number, 40))
    assert trial.order() is None


def test_after_a_restart_a_watch_goes_on_and_an_ended_one_does_not_begin_again():
    running = Trial(NEW, OLD, 3)
    running.observe(span("r", 40))
    again = Trial(NEW, OLD, 3)
    again.resume(running.state())
    assert again.state() == running.state()
    kept = Trial(NEW, OLD, 3)
    kept.observe(span("r", 40))
    kept.resume([NEW.sha256, None, None])
    for number in range(500):
        kept.observe(span(number, 40))
    assert kept.order() is None


def test_after_a_restart_that_comes_before_the_order_is_followed_the_version_is_watched_anew():
    saved = failing().state()
    again = Trial(NEW, OLD, 3)
    again.resume(saved)
    for number in range(500):
        again.observe(span(number, 40))
    assert again.order() is not None


def test_after_a_restart_the_version_that_was_gone_back_to_is_not_left_in_turn():
    saved = failing().state()
    oldest = LiveDraft(1, "digest 1", NO_DRAFTER)
    again = Trial(OLD, oldest, 3)
    again.resume(saved)
    for number in range(500):
        again.observe(span(number, 40))
    assert again.order() is None


@pytest.mark.parametrize("saved", [None, [3, 2, {}], ["digest 3", "digest 9", {}]])
def test_what_was_saved_of_other_versions_is_left_alone(saved):
    trial, fresh = Trial(NEW, OLD, 3), Trial(NEW, OLD, 3)
    trial.resume(saved)
    assert trial.state() == fresh.state()
