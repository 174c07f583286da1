"""Whether a dead engine is started again."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from server.deaths import LONGEST_DELAY, MOST, WINDOW, Deaths


def test_the_first_death_is_answered_at_once_and_the_next_ones_later_and_later():
    deaths = Deaths()
    delays = [deaths.observe(float(i)) for i in range(MOST + 1)]
    assert delays == [0.0, 1.0, 2.0, 4.0, 8.0, None]


def test_deaths_long_ago_are_forgiven():
    deaths = Deaths()
    for i in range(100):
        assert deaths.observe(i * WINDOW * 1.01) == 0.0


@given(st.lists(st.floats(0, 2 * WINDOW), max_size=40))
def test_it_gives_up_exactly_when_there_were_too_many_within_the_window(gaps):
    deaths, times, now = Deaths(), [], 0.0
    for gap in gaps:
        now += gap
        times.append(now)
        delay = deaths.observe(now)
        recent = sum(now - t <= WINDOW for t in times)
        assert (delay is None) == (recent > MOST)
        assert deaths.recent == recent
        if delay is not None:
            assert 0 <= delay <= LONGEST_DELAY
