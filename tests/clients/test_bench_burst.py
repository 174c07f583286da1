"""The burst benchmark: what is sent, who was fastest, and when drafting has followed the load."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clients.bench.burst import parse, reached
from clients.bench.burst_figures import (
    ADAPTIVE,
    PHASES,
    PhaseChange,
    Trace,
    best_fixed,
    phase_changes,
    phase_figures,
    plan_blocks,
)
from clients.bench.common import BenchError
from clients.bench.drafting import Interval, Mark, change_of, intervals, level, mark_of
from clients.bench.samples import Sample
from clients.workload import Prompt

MODES = ("adaptive", "off", "1", "2")


def prompts(count: int) -> list[Prompt]:
    return [Prompt(str(i), (f"prompt {i}",)) for i in range(count)]


def parts(*values: float, steps: int = 10) -> list[Interval]:
    """Intervals of equal length with so many drafts per step."""
    return [Interval(i * steps, (i + 1) * steps, value) for i, value in enumerate(values)]


def sample(block: int, phase: str, mode: str, tokens: int, seconds: float) -> Sample:
    return Sample(
        block=block, phase=phase, measured=True, mode=mode, concurrency=4, started=0.0,
        ended=seconds, requests=1, failed=0, output_tokens=tokens, seconds=seconds,
        request_seconds=seconds, first_token_p50_s=None, steps=0, emitted=0, plain_steps=0,
        drafted=0, lead_tokens=0, others_cpu_share=0.0,
    )  # fmt: skip


def test_a_burst_stands_between_two_quiet_phases_and_no_prompt_is_sent_twice() -> None:
    blocks = plan_blocks(prompts(50), MODES, rounds=2, alone=3, burst=4, waves=2)
    assert [b.phase for b in blocks] == list(PHASES) * 2
    assert [b.concurrency for b in blocks] == [1, 4, 1] * 2
    assert [len(b.prompts) for b in blocks] == [3, 8, 3] * 2
    sent = [p.id for b in blocks for p in b.prompts]
    assert len(set(sent)) == len(sent)
    assert all(sorted(b.modes) == sorted(MODES) for b in blocks)
    for first, second in zip(blocks[:3], blocks[3:], strict=True):
        assert first.modes == second.modes[::-1]


def test_too_few_prompts_are_refused_before_anything_is_sent() -> None:
    with pytest.raises(BenchError, match="2 rounds needs 28 prompts, 27 are left"):
        plan_blocks(prompts(27), MODES, rounds=2, alone=3, burst=4, waves=2)


def test_the_best_fixed_is_the_fastest_apart_from_adaptive() -> None:
    assert best_fixed({"adaptive": 9.0, "off": 3.0, "1": 5.0, "2": 4.0}) == "1"
    assert best_fixed({"adaptive": 1.0, "off": 3.0}) == "off"
    assert best_fixed({"adaptive": 1.0}) is None


def test_the_best_fixed_is_chosen_for_each_phase_over_all_rounds() -> None:
    samples = [
        sample(0, "before", "adaptive", 90, 10.0), sample(0, "before", "off", 50, 10.0),
        sample(0, "before", "1", 100, 10.0), sample(1, "burst", "adaptive", 210, 10.0),
        sample(1, "burst", "off", 200, 10.0), sample(1, "burst", "1", 100, 10.0),
        sample(2, "before", "adaptive", 90, 10.0), sample(2, "before", "off", 110, 10.0),
        sample(2, "before", "1", 80, 10.0),
    ]  # fmt: skip
    before = phase_figures(samples, "before", ("adaptive", "off", "1"))
    assert before.best_fixed == "1"  # 18 tokens/s in all; off has the fastest single block
    assert before.adaptive_over_best is not None
    assert before.adaptive_over_best.value == pytest.approx(1.0)
    burst = phase_figures(samples, "burst", ("adaptive", "off", "1"))
    assert burst.best_fixed == "off"
    assert burst.adaptive_over_best is not None
    assert burst.adaptive_over_best.value == pytest.approx(1.05)


def test_counters_become_intervals_and_a_report_that_is_read_twice_counts_once() -> None:
    marks = [Mark(100, 300), Mark(100, 300), Mark(110, 330), Mark(110, 330), Mark(130, 340)]
    assert intervals(marks) == [Interval(0, 10, 3.0), Interval(10, 30, 0.5)]
    assert intervals([Mark(5, 5)]) == []


def test_the_counters_are_those_of_the_live_version() -> None:
    live = {"steps": 8, "plain_steps": 2, "drafted": [8, 5, 1]}
    assert mark_of({"acceptance": {"live": live}}) == Mark(10, 14)
    assert mark_of({"acceptance": {"live": None}}) == Mark(0, 0)


def test_the_level_is_that_of_the_later_steps_and_no_single_interval_decides_it() -> None:
    assert level(parts(3, 3, 3, 1, 0, 0.1, 0, 3)) == 0.05


def test_a_change_is_placed_between_two_reports() -> None:
    found = change_of(parts(3, 3, 3), parts(3, 2, 0, 0, 0, 0))
    assert found is not None
    assert (found.old, found.new, found.changed) == (3, 0, True)
    assert (found.earliest, found.latest) == (20, 30)


def test_an_interval_that_only_looks_like_the_new_level_is_passed_over() -> None:
    found = change_of(parts(0, 0), parts(0, 3, 0, 3, 3, 3, 3, 3))
    assert found is not None
    assert (found.earliest, found.latest) == (30, 40)


def test_levels_that_hardly_differ_are_no_change() -> None:
    found = change_of(parts(2.9, 2.9), parts(2.7, 2.8))
    assert found is not None
    assert not found.changed
    assert found.latest is None
    assert change_of([], parts(1)) is None


@given(st.floats(0, 3), st.floats(0, 3), st.integers(0, 9), st.integers(10, 30), st.integers(1, 50))
def test_a_clean_change_is_always_found_where_it_is(
    old: float, new: float, late: int, count: int, steps: int
) -> None:
    phase = parts(*[old] * late, *[new] * count, steps=steps)
    found = change_of(parts(old, old), phase)
    assert found is not None
    if found.changed:
        assert (found.earliest, found.latest) == (late * steps, (late + 1) * steps)


def test_steps_of_a_burst_are_divided_by_the_requests_at_a_time() -> None:
    def marks(*values: int) -> list[Mark]:
        """A report after each 8 steps, with so many drafts in them."""
        return [Mark(8 * i, sum(values[:i])) for i in range(len(values) + 1)]

    traces = [
        Trace(0, "before", ADAPTIVE, marks(24, 24)),
        Trace(0, "burst", "off", marks(0, 0)),
        Trace(0, "burst", ADAPTIVE, marks(24, 0, 0, 0)),
        Trace(0, "after", ADAPTIVE, marks(0, 0, 24, 24, 24, 24)),
    ]
    burst, after = phase_changes(traces, 4)
    assert (burst.phase, after.phase) == ("burst", "after")
    assert (burst.engine_steps_earliest, burst.engine_steps_latest) == (2.0, 4.0)
    assert (after.engine_steps_earliest, after.engine_steps_latest) == (16.0, 24.0)


def test_what_is_shown_of_a_change() -> None:
    def shown(old: float, *later: float) -> tuple[str, str]:
        change = change_of(parts(old), parts(*later))
        assert change is not None
        return reached(
            PhaseChange(
                round=0, phase="burst", change=change,
                engine_steps_earliest=change.earliest, engine_steps_latest=change.latest,
            )
        )  # fmt: skip

    assert shown(1, 1, 1) == ("no change", "no change")
    assert shown(3, 0, 0) == ("0", "10")
    assert shown(3, 3, 3, 0, 3, 0, 3, 0) == ("60", "70")
    assert shown(0, 0, 0, 0, 3, 0.4, 3, 0.4) == ("not reached", "not reached")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--burst", "1"], "--burst must be above 1"),
        (["--rounds", "0"], "--rounds must be above 0"),
        (["--modes", "adaptive", "4"], "choose among adaptive, off, 1, 2, 3, each once"),
        (["--modes", "off", "off"], "each once"),
        (["--home", "."], "give a new folder"),
    ],
)
def test_what_cannot_be_measured_is_refused_in_one_line(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        parse(["--workload", "x.jsonl", *words])
    assert message in capsys.readouterr().err.splitlines()[-1]


def test_without_a_choice_all_numbers_of_drafts_are_compared() -> None:
    args = parse(["--workload", "x.jsonl", "--speculative-tokens", "2"])
    assert args.modes == list(MODES)
