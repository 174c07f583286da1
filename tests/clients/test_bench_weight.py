"""The learner's weight: windows, paired ratios, and a learner that is never left stopped."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator

import psutil
import pytest

from clients.bench.common import BenchError
from clients.bench.learner_weight import parse, running_at_the_end, trained_of
from clients.bench.paired import ratio_spread
from clients.bench.weight_figures import (
    WITH,
    WITHOUT,
    Trained,
    Window,
    WindowFigures,
    gaps_within,
    rate_of,
    weight_of,
    window_figures,
    window_order,
)
from clients.load import RequestRecord


def figures(pair: int, learner: str, rate: float, trained: int = 0) -> WindowFigures:
    reports = (Trained(0.0, 0), Trained(10.0, trained)) if learner == WITH else None
    window = Window(pair=pair, learner=learner, begin=0.0, end=10.0, trained=reports)
    return WindowFigures(
        window=window, tokens_per_second=rate, gaps=9, gap_p50_s=1 / rate, gap_p99_s=None
    )


def test_each_pair_has_both_windows_and_they_take_turns_at_being_first() -> None:
    windows = window_order(6)
    assert len(windows) == 12
    firsts = [name for _, name in windows[::2]]
    assert firsts.count(WITH) == firsts.count(WITHOUT) == 3
    for pair in range(6):
        assert {name for number, name in windows if number == pair} == {WITH, WITHOUT}


def test_ratios_are_made_within_pairs() -> None:
    found = ratio_spread([(9.0, 10.0), (19.0, 20.0), (30.0, 30.0), (None, 1.0), (1.0, None)])
    assert found is not None
    assert (found.pairs, found.median, found.min, found.max) == (3, 0.95, 0.9, 1.0)
    assert ratio_spread([(1.0, 0.0)]) is None


def test_only_gaps_within_the_window_count() -> None:
    record = RequestRecord(prompt_id="p", started=0.0, chunk_times=[1.0, 2.0, 4.0, 7.0, 11.0])
    assert gaps_within([record], 2.0, 11.0) == [2.0, 3.0]
    assert gaps_within([record, record], 0.0, 1.5) == []


def test_a_window_has_the_tokens_that_came_in_it() -> None:
    record = RequestRecord(
        prompt_id="p", started=0.0, chunk_times=[1.0, 2.0, 3.0, 4.0], output_tokens=8
    )
    window = Window(pair=0, learner=WITHOUT, begin=1.5, end=3.5, trained=None)
    found = window_figures([record], window)
    assert (found.tokens_per_second, found.gaps, found.gap_p50_s) == (2.0, 1, 1.0)
    nothing = window_figures([], window)
    assert (nothing.tokens_per_second, nothing.gaps, nothing.gap_p50_s) == (0.0, 0, None)


def test_the_rate_goes_by_the_time_of_the_reports() -> None:
    parts = [(Trained(0.0, 100), Trained(4.0, 300)), (Trained(9.0, 300), Trained(10.0, 400))]
    assert rate_of(parts) == 60.0
    assert rate_of([]) == rate_of([(Trained(1.0, 5), Trained(1.0, 5))]) == 0.0


def test_a_learner_that_hardly_trained_makes_the_result_void() -> None:
    def weight(trained: int):
        windows = [figures(0, WITH, 8.0, trained), figures(0, WITHOUT, 10.0)]
        windows += [figures(1, WITHOUT, 20.0), figures(1, WITH, 18.0, trained)]
        return weight_of(4, windows, idle_rate=100.0)

    enough = weight(500)
    assert enough.void is None
    assert (enough.trained_per_second, enough.share_of_idle) == (50.0, 0.5)
    assert enough.tokens_per_second.median == pytest.approx(0.85)
    assert enough.with_tokens_per_second == 13.0
    assert enough.gap_p50 is not None
    assert enough.gap_p50.max == pytest.approx(1.25)
    assert enough.gap_p99 is None
    starved = weight(490)
    assert starved.void is not None
    assert "49 positions/s" in starved.void


def test_windows_without_a_partner_are_left_out_and_none_at_all_is_an_error() -> None:
    lone = figures(1, WITH, 99.0, 1000)
    found = weight_of(1, [figures(0, WITH, 8.0, 1000), figures(0, WITHOUT, 8.0), lone], 100.0)
    assert (found.tokens_per_second.pairs, found.with_tokens_per_second) == (1, 8.0)
    with pytest.raises(ValueError, match="no pair"):
        weight_of(1, [lone], 100.0)


@pytest.fixture
def sleeper() -> Iterator[psutil.Process]:
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    yield psutil.Process(child.pid)
    child.kill()
    child.wait(10)


def stopped(process: psutil.Process) -> bool:
    """Whether it comes to a stop within two seconds; a signal takes a moment."""
    for _ in range(200):
        if process.status() == psutil.STATUS_STOPPED:
            return True
        time.sleep(0.01)
    return False


def fail_with_it_stopped(process: psutil.Process) -> None:
    with running_at_the_end(process):
        process.suspend()
        assert stopped(process)
        raise RuntimeError("the load failed")


def wake_when_it_has_ended(process: psutil.Process) -> None:
    with running_at_the_end(process):
        process.kill()
        process.wait(10)
        process.resume()


def test_a_stopped_learner_goes_on_when_the_benchmark_fails(sleeper: psutil.Process) -> None:
    with pytest.raises(RuntimeError, match="the load failed"):
        fail_with_it_stopped(sleeper)
    deadline = time.monotonic() + 5
    while sleeper.status() == psutil.STATUS_STOPPED:
        assert time.monotonic() < deadline, "it is still stopped"
        time.sleep(0.01)


def test_a_learner_that_ended_is_said_to_have(sleeper: psutil.Process) -> None:
    with pytest.raises(BenchError, match="has ended"):
        wake_when_it_has_ended(sleeper)


def test_another_learner_is_not_taken_for_the_measured_one() -> None:
    status = {"learner": {"pid": 7, "age_s": 0.5, "tokens_seen": 40}}
    assert trained_of(status, 7).positions == 40
    with pytest.raises(BenchError, match="process 8"):
        trained_of(status, 8)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--window", "0"], "--window must be above 0"),
        (["--max-tokens", "0"], "--max-tokens must be above 0"),
        (["--concurrency", "1", "1"], "each once"),
        (["--home", "."], "is there already"),
    ],
)
def test_what_cannot_be_measured_is_refused_in_one_line(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        parse(["--workload", "x.jsonl", *words])
    assert message in capsys.readouterr().err.splitlines()[-1]
