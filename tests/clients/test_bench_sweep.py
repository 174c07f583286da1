"""A sweep's plan and its options: no prompt twice, levels and modes favoured alike."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from statistics import mean

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clients.bench import command, options
from clients.bench.common import BenchError
from clients.bench.plan import Block
from clients.bench.runner import SETTLE_S
from clients.bench.sweep_command import LEVELS, levels_of, parse
from clients.bench.sweep_plan import sweep_plan, visit_size, visits
from clients.workload import Prompt
from tests.clients.test_bench_plan import write

MODES = ("none", "frozen", "online")


def prompts(count: int) -> list[Prompt]:
    return [Prompt(f"p{i}", (f"prompt {i}",)) for i in range(count)]


def planned(levels: list[int], per_level: int | None, rounds: int) -> list[Block]:
    needed = sum(visit_size(level, per_level) for level in visits(levels, rounds))
    with pytest.raises(BenchError, match=f"needs {needed} prompts, the files hold {needed - 1}"):
        sweep_plan(prompts(needed - 1), MODES, levels, per_level=per_level, rounds=rounds)
    return sweep_plan(prompts(needed), MODES, levels, per_level=per_level, rounds=rounds)


LEVEL_LISTS = st.lists(st.integers(1, 20), min_size=1, max_size=5, unique=True)


@given(LEVEL_LISTS, st.none() | st.integers(1, 9), st.integers(1, 3))
def test_every_mode_gets_every_prompt_once_and_all_are_measured(
    levels: list[int], per_level: int | None, rounds: int
) -> None:
    blocks = planned(levels, per_level, rounds)
    sent = [p.id for b in blocks for p in b.prompts]
    assert len(sent) == len(set(sent))
    for number, block in enumerate(blocks):
        assert block.number == number
        assert block.measured
        assert sorted(block.modes) == sorted(MODES)
        assert len(block.prompts) == (per_level or max(8, 2 * block.concurrency))
    phases = {b.phase: b.concurrency for b in blocks}
    assert sorted(phases.values()) == sorted(levels)


@given(LEVEL_LISTS, st.integers(1, 3))
def test_every_level_stands_as_early_as_late(levels: list[int], rounds: int) -> None:
    walk = visits(levels, rounds)
    assert set(Counter(walk).values()) == {2 * rounds}
    times = [mean(i for i, seen in enumerate(walk) if seen == level) for level in levels]
    assert times == [times[0]] * len(levels)


def test_at_each_level_modes_stand_equally_often_at_each_place() -> None:
    blocks = planned([1, 2, 4, 8, 16, 32], None, rounds=3)
    for level in (1, 2, 4, 8, 16, 32):
        orders = [b.modes for b in blocks if b.concurrency == level]
        for place in range(3):
            assert set(Counter(o[place] for o in orders).values()) == {2}
        for up, down in zip(orders[::2], orders[1::2], strict=True):
            assert up == tuple(reversed(down))
    assert blocks[0].modes != blocks[1].modes


def test_the_default_sweep_takes_25_minutes_where_it_was_sized() -> None:
    args = parse(["--workload", "a.jsonl"])
    blocks = planned(args.concurrency, args.per_level, args.rounds)
    rates = dict(zip(args.concurrency, (50, 72, 103, 147, 210, 300), strict=True))
    serving = sum(
        len(b.prompts) * args.max_tokens / rates[b.concurrency] * len(b.modes) for b in blocks
    )
    minutes = (serving + 2 * SETTLE_S * len(blocks) * len(MODES)) / 60
    assert 20 < minutes < 26


def test_too_few_prompts_are_one_line_before_anything_starts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = [str(write(tmp_path / f"{name}.jsonl", name, "both")) for name in "ab"]
    assert command.main(["sweep", "--workload", *files, "--modes", "none"]) == 2
    error = capsys.readouterr().err.strip()
    assert error.startswith("paceline: the sweep needs 544 prompts, the files hold 3")
    assert len(error.splitlines()) == 1


def test_both_benchmarks_have_the_shared_options() -> None:
    shared = vars(options.make_parser("x", None, "y").parse_args([]))
    bench = command.parse(["--phase", "a.jsonl"])
    assert shared.items() <= vars(bench).items()
    words = ["--workload", "a.jsonl", "b.jsonl", "--dtype", "float32", "--", "-a", "--", "-b"]
    sweep = parse(words)
    assert shared.keys() <= vars(sweep).keys()
    assert sweep.concurrency == levels_of(LEVELS) == [1, 2, 4, 8, 16, 32]
    assert [p.name for p in sweep.workload] == ["a.jsonl", "b.jsonl"]
    assert (sweep.dtype, sweep.serve_flags, sweep.engine_flags) == ("float32", ["-a"], ["-b"])


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--concurrency", "1,0"], "numbers above 0"),
        (["--concurrency", "1,x"], "numbers above 0"),
        (["--concurrency", "2,2"], "twice"),
        (["--concurrency", "64"], "requests would wait: --max-num-seqs 32"),
        (["--per-level", "31"], "too few for concurrency 32"),
        (["--per-level", "0"], "--per-level must be above 0"),
        (["--rounds", "0"], "--rounds must be above 0"),
        (["--max-tokens", "0"], "--max-tokens must be above 0"),
    ],
)
def test_a_sweep_that_means_nothing_is_refused(
    capsys: pytest.CaptureFixture[str], words: list[str], said: str
) -> None:
    with pytest.raises(SystemExit):
        parse(["--workload", "a.jsonl", *words])
    assert said in capsys.readouterr().err
