"""Figures, intervals, version changes and the report, from made-up samples."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clients.bench.bench_plot import plot, positions, smoothed, spans
from clients.bench.figures import (
    GOAL_BLOCKS,
    Interval,
    length,
    mode_figures,
    paired,
    pooled,
    ratio,
    reached,
    throughput,
)
from clients.bench.phases import Phase
from clients.bench.plain_vllm import SpeculationCounter, environment
from clients.bench.plan import Block
from clients.bench.report import equal_answers, print_results, results_of, show
from clients.bench.runner import BlockRecords
from clients.bench.samples import Change, Reading, Sample, changes_of, make_sample, read_status
from clients.load import RequestRecord
from clients.workload import Prompt
from rlcore.records.acceptance import AcceptanceCount


def sample(mode: str, block: int, tokens: int, seconds: float, **values: object) -> Sample:
    fields: dict[str, object] = {
        "phase": "A",
        "measured": True,
        "concurrency": 1,
        "started": 0.0,
        "ended": seconds,
        "requests": 2,
        "failed": 0,
        "request_seconds": 2 * seconds,
        "first_token_p50_s": 0.1,
        "steps": tokens // 2,
        "emitted": tokens,
        "plain_steps": 0,
        "drafted": 3 * (tokens // 2),
        "lead_tokens": 100 * (block + 1),
        "others_cpu_share": 0.0,
    }
    fields |= {"mode": mode, "block": block, "output_tokens": tokens, "seconds": seconds}
    return Sample(**(fields | values))  # type: ignore[arg-type]


def test_a_machine_that_slows_down_falls_out_of_the_ratio() -> None:
    slow = [1.0, 2.0, 4.0, 8.0]
    online = [sample("online", i, 120, s) for i, s in enumerate(slow)]
    frozen = [sample("frozen", i, 100, s) for i, s in enumerate(slow)]
    found = paired(online, frozen, throughput)
    assert found is not None
    assert found.value == pytest.approx(1.2)
    assert found.low == pytest.approx(1.2)
    assert found.high == pytest.approx(1.2)
    alone = pooled(online, throughput)
    assert alone is not None
    assert alone.low is not None
    assert alone.high is not None
    assert alone.high - alone.low > 10  # the machine's drift is in this one


def test_only_blocks_that_both_had_are_compared() -> None:
    online = [sample("online", i, 100, 1.0) for i in range(6)]
    frozen = [sample("frozen", i, 50, 1.0) for i in (1, 3)]
    online[0] = sample("online", 0, 10_000, 1.0)
    found = paired(online, frozen, throughput)
    assert found is not None
    assert (found.value, found.blocks) == (2.0, 2)
    assert paired(online, [sample("frozen", 9, 50, 1.0)], throughput) is None


def test_one_block_has_no_interval_and_none_no_figure() -> None:
    found = pooled([sample("online", 0, 30, 2.0)], throughput)
    assert found is not None
    assert (found.value, found.low, found.high) == (15.0, None, None)
    assert pooled([], throughput) is None
    assert pooled([sample("none", 0, 30, 2.0, steps=0, emitted=0)], length) is None


@given(st.lists(st.tuples(st.integers(1, 500), st.floats(0.5, 20)), min_size=2, max_size=12))
def test_the_interval_holds_the_pooled_figure_and_lies_within_the_blocks(
    blocks: list[tuple[int, float]],
) -> None:
    samples = [sample("online", i, tokens, s) for i, (tokens, s) in enumerate(blocks)]
    found = pooled(samples, throughput)
    assert found is not None
    assert found.low is not None
    assert found.high is not None
    rates = [tokens / s for tokens, s in blocks]
    slack = 1e-9 * max(rates)
    assert min(rates) - slack <= found.low <= found.high <= max(rates) + slack
    assert found.value == pytest.approx(sum(t for t, _ in blocks) / sum(s for _, s in blocks))


def test_the_interval_covers_the_truth_about_as_often_as_it_says() -> None:
    import numpy as np

    draws = np.random.default_rng(5)
    covered = 0
    for trial in range(200):
        samples = [sample("online", i, int(draws.poisson(200)), 10.0) for i in range(20)]
        found = pooled(samples, throughput, seed=trial)
        assert found is not None
        assert found.low is not None
        assert found.high is not None
        covered += found.low <= 20.0 <= found.high
    assert 175 <= covered <= 200


def test_blocks_without_a_draft_widen_the_length_and_do_not_break_it() -> None:
    samples = [sample("ngram", 0, 40, 1.0, steps=10, emitted=30)]
    samples += [sample("ngram", i, 40, 1.0, steps=0, emitted=0, plain_steps=40) for i in (1, 2, 3)]
    found = mode_figures(samples, "A", "ngram")
    assert found.acceptance_length is not None
    assert found.acceptance_length == Interval(3.0, 3.0, 3.0, 4)
    assert found.tokens_per_step is not None
    assert found.tokens_per_step.value == pytest.approx(150 / 130)


def test_figures_come_from_measured_blocks_of_their_phase() -> None:
    samples = [
        sample("online", 0, 999, 1.0, measured=False),
        sample("online", 1, 20, 1.0),
        sample("online", 2, 999, 1.0, phase="B"),
        sample("frozen", 0, 1, 1.0, measured=False),
        sample("frozen", 1, 10, 1.0, failed=1),
    ]
    assert mode_figures(samples, "A", "online").output_tokens == 20
    assert mode_figures(samples, "A", "frozen").failed == 1
    found = ratio(samples, "A", "online", "frozen")
    assert found is not None
    assert (found.tokens_per_second.value, found.tokens_per_second.blocks) == (2.0, 1)
    assert ratio(samples, "B", "online", "frozen") is None


def test_a_goal_is_reached_by_blocks_in_a_row_and_counted_from_the_phase() -> None:
    rates = [90, 200, 100, 140, 150, 160, 150]  # one lucky block is not enough
    samples = [sample("online", 0, 100, 1.0, phase="before")]
    for i, rate in enumerate(rates, start=1):
        samples.append(sample("online", i, rate, 1.0, lead_tokens=1000 + sum(rates[:i])))
        if i != 4:
            samples.append(sample("frozen", i, 100, 1.0))
    found = reached(samples, "A", "frozen", 1.52)
    assert GOAL_BLOCKS == 3
    assert found.phase_tokens == sum(rates)  # blocks 5, 6 and 7; 4 has no frozen to compare with
    assert found.run_tokens == 1000 + sum(rates)
    assert reached(samples, "A", "frozen", 1.3).phase_tokens == sum(rates[:3])
    assert reached(samples, "A", "frozen", 1.6).phase_tokens is None


def record(prompt: str, tokens: list[list[int]], **values: object) -> RequestRecord:
    fields: dict[str, object] = {
        "started": 1.0,
        "first_token": 1.5,
        "ended": 3.0,
        "token_ids": tokens,
        "output_tokens": sum(map(len, tokens)),
    }
    return RequestRecord(prompt_id=prompt, **(fields | values))  # type: ignore[arg-type]


def test_a_sample_counts_failed_requests_but_not_their_tokens() -> None:
    block = Block(4, "A", True, ("online",), (), 8)
    count = AcceptanceCount(-1, steps=2, plain_steps=1, emitted=5, drafted=[2, 1])
    records = [
        record("a", [[1, 2], [3]]),
        record("b", [[1]], started=2.0, ended=7.0, error="gone"),
        record("c", [[1] * 7], started=1.5, ended=4.0),
    ]
    made = make_sample(block, "online", records, count, lead_tokens=9, others_cpu_share=0.25)
    assert (made.requests, made.failed, made.output_tokens) == (3, 1, 10)
    assert (made.seconds, made.request_seconds) == (6.0, 4.5)
    assert (made.concurrency, made.drafted) == (8, 3)
    assert made.acceptance_length == 2.5
    assert made.tokens_per_step == 2.0
    assert made.tokens_per_second == pytest.approx(10 / 6)


def test_plain_vllm_counts_are_differences_of_its_metrics() -> None:
    def metrics(drafts: int, accepted: int) -> str:
        return (
            f'vllm:spec_decode_num_drafts_total{{engine="0"}} {drafts}.0\n'
            f'vllm:spec_decode_num_accepted_tokens_total{{engine="0"}} {accepted}.0\n'
            f'vllm:spec_decode_num_accepted_tokens_per_pos_total{{position="0"}} 77.0\n'
        )

    before, after = (SpeculationCounter.read(metrics(*n)) for n in ((10, 4), (30, 24)))
    count = after.since(before, output_tokens=100, requests=2)
    assert (count.steps, count.emitted, count.plain_steps) == (20, 40, 58)
    assert count.length == 2.0
    nothing = SpeculationCounter.read("")
    assert nothing.since(nothing, output_tokens=50, requests=5).plain_steps == 45


def test_plain_vllm_gets_intels_openmp_where_it_is(tmp_path: Path) -> None:
    assert "LD_PRELOAD" not in environment(tmp_path)
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "libiomp5.so").touch()
    assert environment(tmp_path)["LD_PRELOAD"] == str(tmp_path / "lib" / "libiomp5.so")


def reading(tokens: int, live: int | None, rollbacks: int | None) -> Reading:
    return Reading(time=tokens / 10, tokens=tokens, requests=1, live=live, rollbacks=rollbacks)


def test_a_rollback_is_told_from_a_promotion() -> None:
    readings = [
        reading(0, 3, 0),
        reading(10, 4, 0),
        Reading(time=2.0, tokens=20, requests=1, error="timeout"),
        reading(30, 3, 1),
        reading(40, 5, 1),
    ]
    assert [(c.tokens, c.version, c.rollback) for c in changes_of(readings)] == [
        (10, 4, False),
        (30, 3, True),
        (40, 5, False),
    ]
    assert changes_of([]) == []


def test_a_status_without_rollbacks_is_read_all_the_same() -> None:
    body = {"draft": {"live": 2}, "learner": {"alive": True}, "traces": {}}
    assert read_status(body, 1.0, 5, 2).rollbacks is None
    assert read_status(body | {"rollbacks": {"count": 3, "last": None}}, 1.0, 5, 2).rollbacks == 3
    assert changes_of([reading(0, 1, None), reading(1, 2, None)])[0].rollback is False
    with pytest.raises(KeyError):
        read_status({}, 1.0, 5, 2)


def test_answers_are_compared_by_their_tokens() -> None:
    parts = [
        BlockRecords(0, "none", [record("a", [[1], [2], [3]]), record("b", [[4]])]),
        BlockRecords(0, "online", [record("b", [[5]]), record("a", [[1, 2], [3]])]),
        BlockRecords(1, "online", [record("c", [[9]])]),
        BlockRecords(1, "none", [record("c", [[9]], error="cut")]),
    ]
    assert equal_answers(["none", "online"], parts) == {"online": (1, 2)}


def test_results_cover_every_phase_and_mode(capsys: pytest.CaptureFixture[str]) -> None:
    samples = []
    for block in range(6):
        phase = "AB"[block // 3]
        for mode, tokens in (("none", 10), ("online", 20)):
            samples.append(sample(mode, block, tokens, 1.0 + block % 3, phase=phase))
    phases = [Phase(name, (), (Prompt("x", ("x",)),)) for name in "AB"]
    args = argparse.Namespace(goal=1.25, temperature=0.0)
    results = results_of(args, phases, ["none", "online"], samples, [], [])
    assert [(f.phase, f.mode) for f in results.figures] == [
        ("A", "none"), ("A", "online"), ("B", "none"), ("B", "online"),
    ]  # fmt: skip
    assert [(r.phase, r.base, r.tokens_per_second.value) for r in results.ratios] == [
        ("A", "none", 2.0),
        ("B", "none", 2.0),
    ]
    print_results(args, results, ["suffix is left out"])
    printed = capsys.readouterr().out
    assert "2.000 (2.000 - 2.000)" in printed
    assert "suffix is left out" in printed
    assert show(None) == "-"


def test_the_plot_is_written_and_smooths_within_a_phase(tmp_path: Path) -> None:
    samples = []
    for block in range(12):
        phase = "A" if block < 6 else "B"
        for mode in ("online", "frozen"):
            samples.append(
                sample(mode, block, 10 + block, 1.0, phase=phase, measured=block % 6 > 3)
            )
    online = [s for s in samples if s.mode == "online"]
    assert smoothed(online, throughput)[5:8] == [14.0, 16.0, 16.5]
    assert spans(samples) == [
        (0, 400, "A", False),
        (400, 600, "A", True),
        (600, 1000, "B", False),
        (1000, 1200, "B", True),
    ]
    first = sample("frozen", 0, 10, 1.0, lead_tokens=0)  # before online had the block
    assert positions([first, *samples])[0] == 100
    path = tmp_path / "bench.png"
    changes = [Change(1.0, 100 * i, i, i, rollback=i == 3) for i in range(1, 20)]
    plot(path, samples, changes, subtitle="made up")
    assert path.read_bytes().startswith(b"\x89PNG")
