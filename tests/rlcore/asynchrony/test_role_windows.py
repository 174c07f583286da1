"""Windows add up to what happened, wherever they are cut."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlcore.asynchrony.errors import EventError
from rlcore.asynchrony.role_windows import RoleMeter

events = st.lists(
    st.tuples(st.integers(1, 100), st.integers(0, 4), st.integers(0, 9), st.integers(0, 50)),
    min_size=1,
    max_size=20,
)


@given(events, st.sets(st.integers(0, 19)))
def test_windows_add_up_to_the_whole_wherever_they_are_cut(script, cuts):
    whole, cut = RoleMeter(0.0, workers=4), RoleMeter(0.0, workers=4)
    now, windows = 0.0, []
    for step, (seconds, workers, depth, units) in enumerate(script):
        for meter in (whole, cut):
            meter.working(workers, now)
            meter.queued(depth, now)
        now += seconds
        for meter in (whole, cut):
            meter.done(units, now)
        if step in cuts or step == len(script) - 1:
            windows.append(cut.window(now))
    one = whole.window(now)
    assert one.busy == pytest.approx(sum(s * w for s, w, _, _ in script) / now / 4)
    assert one.throughput == pytest.approx(sum(u for *_, u in script) / now)
    assert one.queue == pytest.approx(sum(s * d for s, _, d, _ in script) / now)
    assert one.longest_queue == max(d for _, _, d, _ in script)
    assert one.seconds == sum(window.seconds for window in windows)
    for name in ("busy", "throughput", "queue"):
        parts = math.fsum(getattr(window, name) * window.seconds for window in windows)
        assert parts / now == pytest.approx(getattr(one, name))


def test_what_lasts_goes_on_in_the_next_window():
    meter = RoleMeter(10.0)
    meter.working(1, 10.0)
    meter.queued(3, 12.0)
    first, second = meter.window(14.0), meter.window(20.0)
    assert (first.busy, first.queue, first.longest_queue) == (1.0, 1.5, 3)
    assert (second.seconds, second.busy, second.queue, second.longest_queue) == (6.0, 1.0, 3.0, 3)
    assert second.throughput == 0.0


def test_what_cannot_be_is_refused():
    meter = RoleMeter(10.0, workers=2)
    meter.working(2, 11.0)
    for event, words in (
        (lambda: meter.done(1, 10.5), "time went back"),
        (lambda: meter.done(1, math.nan), "time went back"),
        (lambda: meter.working(3, 12.0), "3 of 2 workers"),
        (lambda: meter.queued(-1, 12.0), "cannot hold"),
        (lambda: RoleMeter(0.0, workers=0), "1 or more"),
        (lambda: RoleMeter(0.0).window(0.0), "needs time to pass"),
    ):
        with pytest.raises(EventError, match=words):
            event()
