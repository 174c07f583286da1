"""Figures from made-up timelines whose right answers are known."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clients.load import RequestRecord
from clients.summary import (
    acceptance,
    acceptance_by_version,
    add_counts,
    excess_gaps,
    gaps,
    length_interval,
    longest_stall,
    served_only_by,
    split_excess,
    spread,
    summarize,
    token_rate,
    tokens_per_second,
    tokens_per_step,
)
from rlcore.records.acceptance import AcceptanceCount

TIMES = st.lists(st.floats(0, 100, allow_nan=False), min_size=2, max_size=40).map(sorted)


def record(started: float = 0.0, ended: float = 1.0, **values: object) -> RequestRecord:
    return RequestRecord(prompt_id="p", started=started, ended=ended, **values)  # type: ignore[arg-type]


def count(version: int, *steps: tuple[int, int]) -> AcceptanceCount:
    """Counts of (drafted, accepted) steps."""
    made = AcceptanceCount(version)
    for drafted, accepted in steps:
        made.observe(drafted, accepted)
    return made


def test_percentiles_are_interpolated() -> None:
    found = spread(float(i) for i in range(101))
    assert found is not None
    assert (found.count, found.p50, found.p90, found.p99, found.max) == (
        101,
        50.0,
        90.0,
        99.0,
        100.0,
    )
    two = spread([1.0, 2.0])
    assert two is not None
    assert two.p50 == 1.5
    assert two.p90 == pytest.approx(1.9)
    assert spread([]) is None


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=50))
def test_percentiles_are_ordered_and_do_not_depend_on_order(values: list[float]) -> None:
    found = spread(values)
    assert found == spread(reversed(values))
    assert found is not None
    assert min(values) - 1e-6 <= found.p50 <= found.p90 + 1e-6
    assert found.p90 - 1e-6 <= found.p99 <= found.max + 1e-6
    assert found.max == max(values)


def test_the_stall_is_the_longest_gap_less_the_median_gap() -> None:
    times = [10.0, 10.04, 10.08, 10.38, 10.42]  # gaps 40, 40, 300, 40 ms
    assert gaps(times) == pytest.approx([0.04, 0.04, 0.30, 0.04])
    assert longest_stall(times) == pytest.approx(0.26)
    assert longest_stall([0.0, 0.1, 0.2, 0.3]) == pytest.approx(0.0)
    assert longest_stall([1.0]) is None
    assert longest_stall([]) is None


def test_waiting_for_the_first_token_is_no_stall() -> None:
    late = record(
        started=0.0, ended=9.2, chunk_times=[9.0, 9.1, 9.2], first_token=9.0, output_tokens=3
    )
    found = summarize([late])
    assert found.stall_s is not None
    assert found.stall_s.max == pytest.approx(0.0)
    assert found.first_token_s is not None
    assert found.first_token_s.p50 == 9.0


@given(TIMES, st.floats(0, 50))
def test_a_shifted_stream_stalls_as_long(times: list[float], shift: float) -> None:
    assert longest_stall([t + shift for t in times]) == pytest.approx(
        longest_stall(times), abs=1e-6
    )


@given(TIMES, st.floats(1, 50))
def test_a_pause_of_an_even_stream_is_found_in_full(times: list[float], pause: float) -> None:
    even = [0.1 * i for i in range(12)]
    broken = [t if i < 6 else t + pause for i, t in enumerate(even)]
    assert longest_stall(broken) == pytest.approx(pause)


def test_gaps_are_told_apart_by_the_swaps_they_overlap() -> None:
    times = [0.0, 1.0, 2.0, 3.0, 6.0, 7.0]
    around, elsewhere = split_excess(times, [(3.5, 4.0)])
    assert around == [2.0]
    assert elsewhere == [0.0, 0.0, 0.0, 0.0]
    assert split_excess(times, [(0.9, 1.1)]) == ([0.0, 0.0], [0.0, 2.0, 0.0])
    assert split_excess(times, [(6.0, 6.0)]) == ([], [0.0, 0.0, 0.0, 2.0, 0.0])
    assert split_excess([1.0], [(0.0, 2.0)]) == ([], [])


@given(TIMES, st.lists(st.tuples(st.floats(0, 100), st.floats(0, 3)), max_size=4))
def test_every_gap_is_on_exactly_one_side(
    times: list[float], swaps: list[tuple[float, float]]
) -> None:
    around, elsewhere = split_excess(times, [(begin, begin + long) for begin, long in swaps])
    assert sorted(around + elsewhere) == sorted(excess_gaps(times))


def test_tokens_per_second_counts_from_first_start_to_last_end() -> None:
    records = [record(1.0, 3.0, output_tokens=20), record(2.0, 5.0, output_tokens=20)]
    assert tokens_per_second(records) == 10.0
    failed = record(2.0, 9.0, output_tokens=None, error="TimeoutError: ")
    assert tokens_per_second([*records, failed]) == 5.0
    assert tokens_per_second([]) == 0.0


def test_token_rate_sees_only_what_arrived_inside() -> None:
    one = record(chunk_times=[0.5, 1.5, 2.0, 2.5], output_tokens=8)  # two tokens a chunk
    assert token_rate([one], 0.0, 1.0) == 2.0
    assert token_rate([one], 1.0, 3.0) == 3.0
    assert token_rate([one], 2.0, 2.5) == 4.0
    assert token_rate([record()], 0.0, 1.0) == 0.0


@given(st.lists(st.floats(0, 10), min_size=1, max_size=20), st.integers(1, 50), st.floats(0.1, 9.9))
def test_token_rates_of_the_parts_make_the_whole(
    times: list[float], tokens: int, cut: float
) -> None:
    one = record(chunk_times=sorted(times), output_tokens=tokens)
    parts = token_rate([one], 0.0, cut) * cut + token_rate([one], cut, 11.0) * (11.0 - cut)
    assert parts == pytest.approx(tokens)


def test_acceptance_is_kept_apart_by_version() -> None:
    records = [
        record(versions=[count(1, (3, 3), (3, 0)), count(2, (3, 1))]),
        record(versions=[count(2, (3, 2), (0, 0))]),
        record(versions=[count(2, (3, 3))], error="the stream broke"),
        record(versions=None),
    ]
    found = acceptance_by_version(records)
    assert list(found) == [1, 2]
    assert found[1].length == 2.5
    assert found[2].length == 2.5
    assert (found[2].steps, found[2].plain_steps, found[2].emitted) == (2, 1, 5)
    assert found[2].drafted == [2, 2, 2]
    assert found[2].accepted == [2, 1, 0]
    assert acceptance(records).length == 10 / 4


def test_the_two_lengths_differ_by_the_plain_steps() -> None:
    made = count(1, (3, 3), (0, 0), (0, 0))
    assert made.length == 4.0
    assert tokens_per_step(made) == 2.0
    assert tokens_per_step(AcceptanceCount(1)) is None
    assert acceptance([]).length is None


@given(st.lists(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), max_size=8), max_size=6))
def test_adding_counts_is_counting_all_steps(groups: list[list[tuple[int, int]]]) -> None:
    groups = [[(k, min(k, a)) for k, a in steps] for steps in groups]
    together = count(7, *(step for steps in groups for step in steps))
    assert add_counts((count(7, *steps) for steps in groups), 7) == together


def test_adding_counts_leaves_its_terms_alone() -> None:
    one, two = count(1, (1, 1)), count(1, (3, 2))
    add_counts([one, two])
    assert one == count(1, (1, 1))
    assert two == count(1, (3, 2))


def test_served_only_by_looks_at_admission_and_at_every_step() -> None:
    pure = record(admitted_version=2, versions=[count(2, (3, 1)), AcceptanceCount(1)])
    assert served_only_by(pure, 2)
    assert not served_only_by(pure, 1)
    assert not served_only_by(record(admitted_version=1, versions=[count(2, (3, 1))]), 2)
    assert not served_only_by(
        record(admitted_version=2, versions=[count(2, (3, 1)), count(1, (0, 0))]), 2
    )
    assert not served_only_by(record(admitted_version=2, versions=None), 2)


def test_the_summary_counts_failures_and_restarts() -> None:
    records = [
        record(0.0, 2.0, chunk_times=[0.5, 1.0, 2.0], first_token=0.5, output_tokens=6),
        record(0.0, 4.0, chunk_times=[1.0, 2.0], first_token=1.0, output_tokens=6, restarted=True),
        record(0.0, 1.0, chunk_times=[0.1, 0.9], error="APIError: gone"),
    ]
    found = summarize(records)
    assert (found.requests, found.failed, found.restarted, found.output_tokens) == (3, 1, 1, 12)
    assert found.seconds == 4.0
    assert found.tokens_per_second == 3.0
    assert found.gap_s is not None
    assert (found.gap_s.count, found.gap_s.p50, found.gap_s.max) == (3, 1.0, 1.0)
    assert found.stall_s is not None
    assert (found.stall_s.count, found.stall_s.max) == (2, 0.25)
    assert found.acceptance == []
    assert found.acceptance_length is None
    assert summarize([]).requests == 0


def test_the_length_interval_holds_the_length_and_narrows_with_requests():
    few = [record(versions=[count(1, (3, i % 4), (3, 1))]) for i in range(8)]
    low, high = length_interval(few)
    assert low <= acceptance(few).length <= high
    many_low, many_high = length_interval(few * 20)
    assert many_high - many_low < (high - low) / 2
    alike = [record(versions=[count(1, (3, 1))])] * 5
    assert length_interval(alike) == (2.0, 2.0)


def test_one_request_or_none_that_drafted_has_no_length_interval():
    assert length_interval([record(versions=[count(1, (3, 1))])]) is None
    assert length_interval([record(versions=[count(1, (0, 0))]), record()]) is None
