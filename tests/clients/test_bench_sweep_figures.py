"""A sweep's figures by level and mode, from made-up samples and records."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from clients.bench.figures import Interval
from clients.bench.latency import chunk_gaps, first_token_times, percentiles, token_times
from clients.bench.plan import Block
from clients.bench.runner import BlockRecords
from clients.bench.samples import Sample, make_sample
from clients.bench.sweep_figures import level_figures, level_ratio, mean_k
from clients.bench.sweep_plot import over_plain, plot
from clients.bench.sweep_report import pairs, print_results, results_of
from clients.load import RequestRecord
from rlcore.records.acceptance import AcceptanceCount
from tests.clients.test_bench_figures import record, sample


def stream(prompt: str, times: list[float], sizes: list[int], **values: object) -> RequestRecord:
    return record(
        prompt,
        [[7] * size for size in sizes],
        started=0.0,
        first_token=times[0],
        chunk_times=times,
        ended=times[-1] + 5.0,
        **values,
    )


def test_percentiles_are_of_all_blocks_values_and_vary_by_whole_blocks() -> None:
    blocks = [[float(v) for v in range(100)], [1000.0] * 100, []]
    found = percentiles(blocks)
    assert found is not None
    assert found.values == 200
    assert found.p50.value == pytest.approx(np.percentile(blocks[0] + blocks[1], 50))
    assert found.p99.value == 1000.0
    assert (found.p50.low, found.p50.high, found.p50.blocks) == (49.5, 1000.0, 2)
    alone = percentiles([[1.0, 3.0]])
    assert alone is not None
    assert alone.p50 == Interval(2.0, None, None, 1)
    assert percentiles([[], []]) is None


def test_few_different_draws_count_as_often_as_they_are_drawn() -> None:
    # All four draws the lowest block: 1 in 256, but 1 in 35 of the different draws.
    found = percentiles([[1.0], [2.0], [3.0], [4.0]])
    assert found is not None
    assert found.p99.low == pytest.approx(2.0, abs=0.05)


def test_a_requests_time_per_token_leaves_out_its_first_chunk_and_its_end() -> None:
    records = [stream("a", [0.5, 1.0, 2.0], [4, 2, 1]), stream("b", [0.25], [1])]
    assert token_times(records) == [0.5]
    assert chunk_gaps(records) == [0.5, 1.0]
    assert first_token_times(records) == [0.5, 0.25]


def test_mean_k_counts_steps_without_a_draft_and_knows_zero_from_unknown() -> None:
    some = [sample("online", i, 40, 1.0, steps=10, plain_steps=10, drafted=30) for i in (0, 1)]
    assert mean_k(some) == Interval(1.5, 1.5, 1.5, 2)
    none = [
        sample("none", i, 40, 1.0, steps=0, emitted=0, plain_steps=40, drafted=0) for i in (0, 1)
    ]
    assert mean_k(none) == Interval(0.0, 0.0, 0.0, 2)
    assert mean_k([*some, sample("ngram", 2, 40, 1.0, drafted=None)]) is None


def test_drafts_that_nobody_counted_are_not_zero() -> None:
    def drafted(count: AcceptanceCount) -> int | None:
        block = Block(0, "A", True, ("ngram",), (), 1)
        made = make_sample(
            block, "ngram", [record("a", [[1]])], count, lead_tokens=0, others_cpu_share=0
        )
        return made.drafted

    assert drafted(AcceptanceCount(-1, steps=2, emitted=3)) is None
    assert drafted(AcceptanceCount(-1, plain_steps=2)) == 0


def made() -> tuple[list[Sample], list[BlockRecords]]:
    """Levels 1 and 8, in blocks 0 to 3; the machine gets slower; online is 1.2 times as fast."""
    samples, records = [], []
    for block, level in enumerate((1, 8, 8, 1)):
        for mode, tokens in (("none", 100), ("frozen", 90), ("online", 120)):
            samples.append(sample(mode, block, tokens, 1.0 + block, concurrency=level))
            good = stream("a", [0.1 * level, 0.2 * level, 0.4 * level], [1, 1, 1])
            bad = stream("b", [50.0, 99.0], [1, 1], error="cut")
            records.append(BlockRecords(block, mode, [good, bad]))
    return samples, records


def test_a_level_has_its_own_blocks_and_only_requests_that_did_not_fail() -> None:
    samples, records = made()
    found = level_figures(samples, records, 8, "online")
    assert (found.requests, found.output_tokens) == (4, 240)
    assert found.tokens_per_second is not None
    assert found.tokens_per_second.value == pytest.approx(240 / 5)
    assert found.first_token_s is not None
    assert (found.first_token_s.values, found.first_token_s.p99.value) == (2, pytest.approx(0.8))
    assert found.gap_s is not None
    assert (found.gap_s.values, found.gap_s.p50.value) == (4, pytest.approx(1.2))
    assert found.token_s is not None
    assert found.token_s.p50.value == pytest.approx(1.2)


def test_level_ratios_are_paired_by_block() -> None:
    samples, _ = made()
    found = level_ratio(samples, 8, "online", "none")
    assert found is not None
    speed = found.tokens_per_second
    assert [speed.value, speed.low, speed.high] == pytest.approx([1.2] * 3)
    assert level_ratio(samples, 2, "online", "none") is None


def test_ours_is_compared_with_all_and_all_with_no_speculation() -> None:
    assert pairs(["none", "frozen", "online"]) == [
        ("online", "none"),
        ("online", "frozen"),
        ("frozen", "none"),
    ]
    assert pairs(["online", "ngram"]) == [("online", "ngram")]
    assert pairs(["frozen", "none"]) == [("none", "frozen")]
    assert pairs(["frozen"]) == []


def test_the_report_has_every_level_and_mode_in_order(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    samples, records = made()
    modes = ["none", "frozen", "online"]
    results = results_of(modes, samples, records, [])
    assert [(f.concurrency, f.mode) for f in results.levels] == [
        (level, mode) for level in (1, 8) for mode in modes
    ]
    gain = over_plain(results)
    assert gain["online"].keys() == gain["frozen"].keys() == {1, 8}
    assert gain["online"][8] is not None
    assert gain["online"][8].value == pytest.approx(1.2)
    assert not gain["none"]
    print_results(results, ["suffix is left out"])
    printed = capsys.readouterr().out
    assert "online / frozen" in printed
    assert "1200 / 1600 / 1600" in printed
    assert "suffix is left out" in printed
    path = tmp_path / "sweep.png"
    plot(path, results, subtitle="made up")
    assert path.read_bytes().startswith(b"\x89PNG")
    plot(path, results_of(["frozen"], samples[1:2], records, []), subtitle="one mode, one block")
