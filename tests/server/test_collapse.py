"""The alarm: raised when hardly any draft is accepted, and only then; cleared when they are again."""

import random

from hypothesis import given
from hypothesis import strategies as st

from server.collapse import CLEARED_ABOVE, RAISED_BELOW, WINDOW_STEPS, CollapseAlarm


class Engine:
    """Counts drafted steps as the engine's reports do."""

    def __init__(self) -> None:
        self.steps = self.emitted = 0

    def draft(self, steps: int, accepted: int) -> tuple[int, int]:
        """The totals after ``steps`` more, with ``accepted`` accepted drafts in all of them."""
        self.steps += steps
        self.emitted += steps + accepted
        return self.steps, self.emitted


def test_a_collapse_is_seen_within_the_window_and_cleared_with_hysteresis():
    engine, alarm = Engine(), CollapseAlarm()
    for _ in range(20):
        assert alarm.observe(1, True, *engine.draft(50, 40)) is None
    seen = [alarm.observe(1, True, *engine.draft(50, 0)) for _ in range(WINDOW_STEPS // 50)]
    assert seen[-1] == "raised"
    assert seen[:-1] == [None] * (len(seen) - 1)
    for _ in range(20):  # above what raises it, below what clears it
        assert alarm.observe(1, True, *engine.draft(50, 2)) is None
    assert RAISED_BELOW <= alarm.length <= CLEARED_ABOVE
    assert alarm.active
    back = [alarm.observe(1, True, *engine.draft(50, 20)) for _ in range(WINDOW_STEPS // 50)]
    assert back.count("cleared") == 1
    assert not alarm.active


@given(st.lists(st.integers(1, 120), min_size=5, max_size=60), st.integers(0, 10**6))
def test_the_length_is_that_of_about_the_last_window(parts, before):
    engine, alarm = Engine(), CollapseAlarm()
    engine.draft(before, before // 3)
    draw = random.Random(before)
    alarm.observe(1, True, engine.steps, engine.emitted)
    rows = []
    for steps in parts:
        accepted = draw.randint(0, 3 * steps)
        rows.append((steps, accepted))
        alarm.observe(1, True, *engine.draft(steps, accepted))
    steps = accepted = 0
    for row in reversed(rows):
        steps, accepted = steps + row[0], accepted + row[1]
        if steps >= WINDOW_STEPS:
            break
    expected = (steps + accepted) / steps if steps >= WINDOW_STEPS else None
    assert alarm.length == expected


def test_few_steps_say_nothing():
    engine, alarm = Engine(), CollapseAlarm()
    alarm.observe(1, True, 0, 0)
    assert alarm.observe(1, True, *engine.draft(WINDOW_STEPS - 1, 0)) is None
    assert alarm.observe(1, True, *engine.draft(1, 0)) == "raised"


def test_what_was_counted_before_the_first_report_is_not_looked_at():
    alarm = CollapseAlarm()
    assert alarm.observe(1, True, 10_000, 10_000) is None
    assert alarm.length is None


def test_a_new_version_starts_afresh_and_ends_the_alarm():
    engine, alarm = Engine(), CollapseAlarm()
    alarm.observe(1, True, 0, 0)
    assert alarm.observe(1, True, *engine.draft(WINDOW_STEPS, 0)) == "raised"
    assert alarm.observe(2, True, 0, 0) == "cleared"
    assert alarm.length is None
    assert alarm.observe(2, True, WINDOW_STEPS, WINDOW_STEPS) == "raised"


def test_an_untrained_version_raises_nothing():
    engine, alarm = Engine(), CollapseAlarm()
    for _ in range(10):
        assert alarm.observe(0, False, *engine.draft(WINDOW_STEPS, 0)) is None


def test_an_engine_that_was_started_again_counts_from_zero():
    engine, alarm = Engine(), CollapseAlarm()
    for _ in range(50):
        alarm.observe(1, True, *engine.draft(100, 80))
    assert alarm.observe(1, True, WINDOW_STEPS - 1, WINDOW_STEPS - 1) is None
    assert alarm.length is None
    assert alarm.observe(1, True, WINDOW_STEPS, WINDOW_STEPS) == "raised"


def test_reports_without_new_steps_change_nothing():
    engine, alarm = Engine(), CollapseAlarm()
    alarm.observe(1, True, 0, 0)
    alarm.observe(1, True, *engine.draft(WINDOW_STEPS, 0))
    for _ in range(100):
        assert alarm.observe(1, True, engine.steps, engine.emitted) is None
    assert alarm.active
    assert len(alarm._window) == 1  # idle hours cost no memory
