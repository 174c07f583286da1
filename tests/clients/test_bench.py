"""The benchmarks' own reckoning, on made-up runs."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from clients.bench import capture_cost, common, swaps
from clients.bench.day0_curve import Change, Poll, curve, final_window, version_changes
from clients.bench.day0_plot import plot
from clients.load import LoadResult, RequestRecord
from clients.workload import Prompt
from rlcore.records.acceptance import AcceptanceCount


def record(
    started: float, ended: float, version: int, accepted: int, **values: object
) -> RequestRecord:
    made = AcceptanceCount(version)
    made.observe(3, accepted)
    fields: dict[str, object] = {
        "admitted_version": version,
        "versions": [made],
        "output_tokens": accepted + 1,
    }
    return RequestRecord(prompt_id="p", started=started, ended=ended, **(fields | values))  # type: ignore[arg-type]


def test_a_change_is_seen_at_the_poll_after_it() -> None:
    polls = [
        Poll(0, 1),
        Poll(5, 1),
        Poll(10, error="timeout"),
        Poll(15, 2),
        Poll(20, 2),
        Poll(25, 1),
    ]
    assert version_changes(polls) == [Change(15, 2), Change(25, 1)]
    assert version_changes([Poll(0, 4)]) == []


def test_the_final_window_holds_only_requests_after_the_last_promotion() -> None:
    mixed = AcceptanceCount(1)
    mixed.observe(3, 3)
    records = [
        record(1, 9, version=1, accepted=3),
        record(9, 12, version=2, accepted=3),  # begun before the change was seen
        record(11, 13, version=1, accepted=3),  # admitted under the old version
        record(11, 14, version=2, accepted=3, versions=[mixed]),
        record(11, 15, version=2, accepted=3, error="gone"),
        record(12, 16, version=2, accepted=0),
        record(13, 17, version=2, accepted=1),
        record(14, 18, version=2, accepted=2),
    ]
    found = final_window(records, [Change(5, 1), Change(10, 2)], window=2)
    assert found is not None
    assert (found.version, found.requests, found.all_requests, found.steps) == (2, 2, 3, 2)
    assert found.acceptance_length == 2.5
    assert found.all_acceptance_length == 2.0
    assert final_window(records, [], window=2) is None
    none = final_window(records, [Change(50, 3)], window=2)
    assert none is not None
    assert (none.requests, none.acceptance_length) == (0, None)


def test_the_curve_looks_back_over_a_window_of_ended_requests() -> None:
    records = [record(0, end, version=1, accepted=end - 1) for end in (1, 2, 3, 4)]
    points = curve(
        records, [Poll(0.5, 1), Poll(2.5, 1, learner={"tokens_seen": 7}), Poll(9, 1)], window=2
    )
    assert [p.requests for p in points] == [0, 2, 4]
    assert [p.acceptance_length for p in points] == [None, 1.5, 3.5]
    assert [p.tokens_served for p in points] == [0, 3, 10]
    assert [p.learner_tokens for p in points] == [None, 7, None]


def test_the_plot_is_written(tmp_path: Path) -> None:
    records = [record(0, end, version=1, accepted=end % 4) for end in range(1, 60)]
    points = curve(records, [Poll(float(t), 1) for t in range(60)], window=5)
    changes = [Change(float(t), t) for t in range(2, 40)]
    path = tmp_path / "curve.png"
    plot(path, points, changes, goal=1.3, window=5, subtitle="made up")
    assert path.read_bytes().startswith(b"\x89PNG")


def test_swap_report_tells_gaps_at_swaps_from_others() -> None:
    steady = [i * 0.1 for i in range(11)]
    stalled = [t if t < 0.45 else t + 0.3 for t in steady]
    records = [
        record(0, 1.1, 1, 2, chunk_times=steady),
        record(0, 1.4, 1, 2, chunk_times=stalled, restarted=True),
        record(0, 0.6, 1, 2, chunk_times=[0.1, 0.2], error="cut"),
    ]
    done = swaps.Swap(2, 0.42, 0.44, streams=2, seconds=0.015)
    refused = swaps.Swap(1, 0.9, 0.95, streams=1, error="HTTP 409")
    result = LoadResult(records=records, started=0, ended=2, ended_by="stop")
    found = swaps.report_of(result, [done, refused], counted=1, preemptions=0)
    assert (found.asked, found.done, found.failed, found.fewest_streams) == (2, 1, 1, 1)
    assert (found.requests, found.failed_requests, found.restarted_requests) == (3, 1, 1)
    assert found.swap_s is not None
    assert (found.swap_s.count, found.swap_s.p50) == (1, 0.015)
    assert found.stall_s is not None
    assert (found.stall_s.count, found.stall_s.max) == (2, pytest.approx(0.3))
    assert found.around_s is not None
    assert found.around_s.max == pytest.approx(0.3)
    assert found.elsewhere_s is not None
    assert found.elsewhere_s.max == pytest.approx(0.0)


def test_a_stream_crosses_a_swap_only_with_tokens_on_both_sides() -> None:
    records = [
        record(0, 9, 1, 0, chunk_times=times) for times in ([1.0, 5.0], [1.0, 2.0], [4.0, 5.0], [])
    ]
    assert swaps.crossing(records, 3.0, 3.5) == 1


def test_the_version_that_is_live_is_never_activated_first() -> None:
    drafts = [{"version": v} for v in (0, 3, 5)]
    assert swaps.choose_pair(drafts, 5, None) == (3, 5)
    assert swaps.choose_pair(drafts, 3, None) == (5, 3)
    assert swaps.choose_pair(drafts, 5, [5, 0]) == (0, 5)
    for bad in ([5, 9], [5, 5]):
        with pytest.raises(common.BenchError):
            swaps.choose_pair(drafts, 5, bad)
    with pytest.raises(common.BenchError, match="only version 0"):
        swaps.choose_pair([{"version": 0}], 0, None)


def test_a_counter_is_summed_over_its_labels() -> None:
    text = '# HELP a_total x\na_total{engine="0"} 2.0\na_total{engine="1"} 3.0\na_total_more 9\n'
    assert swaps.metric_total(text, "a_total") == 5.0
    assert swaps.metric_total(text, "b_total") == 0.0


def run(rate: float) -> capture_cost.Run:
    return capture_cost.Run(rate, 100, 0, 0.04, 0.05, 0.0)


def test_ratios_are_paired_within_a_round() -> None:
    rates = [(9.0, 10.0), (19.0, 20.0), (30.0, 30.0)]  # on, off: the machine itself gets faster
    pairs = [capture_cost.Pair(i, 1, "on", run(on), run(off)) for i, (on, off) in enumerate(rates)]
    pairs.append(capture_cost.Pair(0, 8, "off", run(50.0), run(100.0)))
    found = capture_cost.ratio_of(1, pairs)
    assert (found.rounds, found.median, found.min, found.max) == (3, 0.95, 0.9, 1.0)
    assert capture_cost.ratio_of(8, pairs).median == 0.5


def test_both_servers_go_first_equally_often_at_each_concurrency() -> None:
    for position in (0, 1):
        firsts = [capture_cost.order(number, position)[0] for number in range(8)]
        assert firsts.count("on") == firsts.count("off") == 4
    assert capture_cost.order(0, 0)[0] != capture_cost.order(0, 1)[0]


@pytest.mark.parametrize(
    ("on", "off", "received", "fine"),
    [(5, 0, 4, True), (0, 0, 4, False), (5, 0, 0, False), (5, 1, 4, False)],
)
def test_a_comparison_of_nothing_is_refused(on: int, off: int, received: int, fine: bool) -> None:
    before = {"on": {"captured": 2}, "off": {"captured": 0}}
    after = {"on": {"captured": 2 + on}, "off": {"captured": off}}
    if fine:
        capture_cost.check_capture(before, after, received)
    else:
        with pytest.raises(common.BenchError):
            capture_cost.check_capture(before, after, received)


def test_prompts_are_never_taken_twice() -> None:
    prompts = [Prompt(str(i), (str(i),)) for i in range(3)]
    first, rest = common.take(prompts, 2, "a round")
    assert [p.id for p in (*first, *rest)] == ["0", "1", "2"]
    with pytest.raises(common.BenchError, match="needs 2 prompts"):
        common.take(rest, 2, "a round")


def test_flags_behind_the_dashes_go_to_the_server_last() -> None:
    parser = common.make_parser("x", "doc", max_tokens=9)
    args = common.parse(parser, ["--workload", "a.jsonl", "b.jsonl", "--", "--dtype", "float32"])
    assert [p.name for p in args.workload] == ["a.jsonl", "b.jsonl"]
    flags = common.serve_flags(args, "--learner", "off")
    assert flags[-2:] == ["--dtype", "float32"]
    assert flags[-4:-2] == ["--learner", "off"]


def test_the_report_is_plain_json(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    common.write_json(path, {"a": Change(1.0, 2), "path": Path("/x"), "t": (1, None)})
    assert path.read_text().split() == [
        "{",
        '"a":',
        "{",
        '"time":',
        "1.0,",
        '"version":',
        "2",
        "},",
        '"path":',
        '"/x",',
        '"t":',
        "[",
        "1,",
        "null",
        "]",
        "}",
    ]
    assert [p.name for p in tmp_path.iterdir()] == ["report.json"]


def test_the_processor_is_named(tmp_path: Path) -> None:
    info = tmp_path / "cpuinfo"
    info.write_text("processor\t: 0\nmodel name\t: A chip: fast\n")
    assert common.cpu_model(info) == "A chip: fast"


ENDED = """
import asyncio
from clients.bench import common

async def wait():
    try:
        print("waiting", flush=True)
        await asyncio.sleep(60)
    finally:
        print("cleaned", flush=True)

common.run_main(lambda: asyncio.run(wait()))
"""


def test_a_benchmark_that_is_terminated_cleans_up() -> None:
    command = [sys.executable, "-c", ENDED]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "waiting\n"
        process.terminate()
        assert process.stdout.read() == "cleaned\n"
    assert process.returncode == 128 + signal.SIGTERM
