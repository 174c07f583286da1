"""The traffic's speed is that of the present window, whenever it is asked for."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from learner.speed import SPEED_WINDOW, Speed

pauses = st.lists(st.tuples(st.floats(0, 200), st.integers(0, 500), st.booleans()), max_size=30)


@given(pauses)
def test_only_what_came_in_the_last_window_counts(rows):
    speed, now = Speed(), 0.0
    arrivals: list[tuple[float, int]] = []
    for pause, tokens, ask in rows:
        now += pause
        if ask:
            recent = sum(n for at, n in arrivals if at >= now - SPEED_WINDOW)
            assert speed.at(now) == pytest.approx(recent / SPEED_WINDOW)
        speed.add(tokens, now)
        arrivals.append((now, tokens))
    assert speed.at(now + 2 * SPEED_WINDOW) == 0.0
