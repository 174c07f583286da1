"""A frame of ``paceline top`` for every state and size."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.cells import cell_len

from clients.top.frame import frame
from clients.top.glyphs import BLOCKS, bar, curve, large
from clients.top.state import SPAN_S, TopState
from rlcore.feed import LearnerSample
from tests.clients.recorded import START, changes, history, sample

NOW = START + 301


def live(seconds: int = 300) -> TopState:
    state = TopState("http://server")
    state.take(history(seconds))
    state.take(sample(seconds))
    return state


def shown(state: TopState, width: int = 80, height: int | None = 24, now: float = NOW) -> str:
    return "\n".join(line.plain for line in frame(state, width, height, now))


@settings(max_examples=60)
@given(st.integers(1, 200), st.integers(1, 60), st.sampled_from(["connecting", "live", "lost"]))
def test_a_frame_fits_its_terminal(width, height, how):
    state = TopState("http://server") if how == "connecting" else live(40)
    if how == "lost":
        state.lost("no server answers at http://server")
    lines = frame(state, width, height, NOW)
    assert len(lines) <= height
    assert all(cell_len(line.plain) <= width for line in lines)


@pytest.mark.parametrize(("width", "height"), [(80, 24), (40, 24), (120, 40)])
def test_what_matters_is_on_the_frame(width, height):
    text = shown(live(), width, height)
    newest = sample(300)
    for expected in (f"{newest.tokens_per_s:.1f}", f"{newest.acceptance_length:.2f}", "38.4",
                     "2.90 mean", "draft 7", "policy 0", "training", "398 of 412 sent",
                     *large(f"{newest.speedup:.2f}x")):  # fmt: skip
        assert expected in text, expected
    if width > 40:
        assert "team-a" in text
        assert "rollback 7 to 6" in text


def test_without_a_height_nothing_is_left_out():
    text = shown(live(), 120, None)
    assert text.count("swap") == 2
    assert "opted_out 14" in text


def test_a_lost_server_is_said_and_its_last_figures_stay_dim():
    state = live()
    state.lost("no server answers at http://server")
    lines = frame(state, 80, 24, NOW)
    assert "no server answers" in lines[0].plain
    assert "trying again" in lines[0].plain
    assert f"{sample(300).tokens_per_s:.1f}" in shown(state)
    assert all(any("dim" in str(s.style) for s in line.spans) for line in lines[5:8])
    state.take(history(300))
    assert "no connection" not in shown(state)


def test_a_feed_that_went_silent_is_said():
    assert "silent" not in shown(live(), now=NOW)
    assert "silent for 30 s" in shown(live(), now=START + 330)


def test_what_is_not_known_is_not_a_number():
    nothing = sample(
        10, speedup=None, plain_tokens_per_s=None, acceptance_length=None, busy=None,
        acceptance=(None, None), learner=LearnerSample(state="off"), tenants=(),
    )  # fmt: skip
    state = TopState("http://server")
    state.take(msgspec.structs.replace(history(0), changes=()))
    state.take(nothing)
    text = shown(state)
    assert "speed-up not known" in text
    assert "None" not in text
    assert "nan" not in text


def test_a_collapse_is_said():
    state = live()
    state.take(sample(301, draft_collapsed=True))
    assert "nothing it drafts is accepted" in shown(state)


def test_a_history_replaces_what_another_server_said():
    state = live()
    state.take(history(5, start=START + 9000))
    assert len(state.samples) == 5
    assert len(state.changes) == len(changes())


def test_no_more_is_kept_than_is_shown():
    state = TopState("http://server")
    state.take(history(900))
    assert state.samples[-1].time - state.samples[0].time <= SPAN_S


def test_a_curve_is_blank_where_nothing_is_known_and_highest_at_the_largest_value():
    points = [(0.0, 1.0), (5.0, None), (9.0, 3.0)]
    drawn = curve(points, 10, end=9.0, span=10.0, low=1.0)
    assert len(drawn) == 10
    assert drawn[-1] == BLOCKS[-1]
    assert drawn[0] == BLOCKS[0]
    assert drawn[1:9].strip() == ""


@given(st.lists(st.tuples(st.floats(0, 100), st.none() | st.floats(-5, 5))), st.integers(0, 60))
def test_a_curve_has_its_width_whatever_its_points(points, width):
    assert len(curve(points, width, end=100.0, span=100.0, low=0.0)) == width


@given(st.floats(-1, 2), st.integers(0, 50))
def test_a_bar_has_its_width(share, width):
    assert len(bar(share, width)) == width
