"""Phases, blocks and their order: no prompt twice, every mode its turn."""

from __future__ import annotations

import json
from collections import Counter
from itertools import pairwise, permutations
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clients.bench.arrivals import Burst, arrival_times, with_bursts
from clients.bench.common import BenchError
from clients.bench.phases import Phase, PhaseSpec, deal, load_phases, parse_phases
from clients.bench.plan import order, plan
from clients.workload import Prompt

MODES = ("none", "frozen", "online")


def write(path: Path, *texts: str) -> Path:
    rows = [{"id": f"{path.stem}-{i}", "turns": [text]} for i, text in enumerate(texts)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def phase(name: str, count: int) -> Phase:
    return Phase(name, (), tuple(Prompt(f"{name}{i}", (f"{name} {i}",)) for i in range(count)))


def test_a_phase_is_a_name_files_and_a_count() -> None:
    specs = parse_phases(["A=x/a.jsonl,b.jsonl:30", "x/a.jsonl", "x/a.jsonl:5", "b=c=d.jsonl"])
    assert specs == [
        PhaseSpec("A", (Path("x/a.jsonl"), Path("b.jsonl")), 30),
        PhaseSpec("a", (Path("x/a.jsonl"),), None),
        PhaseSpec("a-2", (Path("x/a.jsonl"),), 5),
        PhaseSpec("b", (Path("c=d.jsonl"),), None),
    ]


@pytest.mark.parametrize("text", ["", ",", "a.jsonl:0"])
def test_a_phase_without_files_or_prompts_is_refused(text: str) -> None:
    with pytest.raises(BenchError, match="--phase"):
        parse_phases([text])


def test_a_name_stands_for_one_phase() -> None:
    with pytest.raises(BenchError, match="name A"):
        parse_phases(["A=a.jsonl", "A=b.jsonl"])


def test_phases_divide_the_files_they_share(tmp_path: Path) -> None:
    a = write(tmp_path / "a.jsonl", *(f"prompt {i}" for i in range(20)), "shared   text")
    b = write(tmp_path / "b.jsonl", "shared text", *(f"other {i}" for i in range(9)))
    specs = parse_phases([f"A={a}", f"B={b}", f"C={a}:5", f"D={a},{b}"])
    phases = load_phases(specs, seed=3)
    keys = [prompt.key for p in phases for prompt in p.prompts]
    assert len(keys) == len(set(keys)) == 30
    assert [len(p.prompts) for p in phases][2] == 5
    assert min(len(p.prompts) for p in phases) >= 4
    assert load_phases(specs, seed=3) == phases
    assert load_phases(specs, seed=4) != phases


def test_prompts_to_avoid_are_never_sent(tmp_path: Path) -> None:
    a = write(tmp_path / "a.jsonl", *(f"prompt {i}" for i in range(10)))
    gone = write(tmp_path / "gone.jsonl", "prompt  3", "prompt 4", "unknown")
    (only,) = load_phases(parse_phases([str(a)]), avoid=[gone])
    assert {p.key for p in only.prompts} == {f"prompt {i}" for i in range(10) if i not in (3, 4)}


def test_too_few_prompts_are_an_error_and_no_shorter_phase(tmp_path: Path) -> None:
    a = write(tmp_path / "a.jsonl", *(f"prompt {i}" for i in range(10)))
    with pytest.raises(BenchError, match=r"phase B asks for 6 prompts and [45] are left"):
        load_phases(parse_phases([f"A={a}:5", f"B={a}:6"]))
    with pytest.raises(BenchError, match=r"phase B asks for some prompts and 0 are left"):
        load_phases(parse_phases([f"A={a}:10", f"B={a}"]))
    with pytest.raises(BenchError, match="No such file"):
        load_phases(parse_phases([str(tmp_path / "gone.jsonl")]))


@given(
    st.lists(st.lists(st.sampled_from("abcdefghij"), unique=True), min_size=1, max_size=5),
    st.data(),
)
def test_dealing_gives_each_key_once_and_leaves_none_to_the_unlimited(
    candidates: list[list[str]], data: st.DataObject
) -> None:
    counts = [data.draw(st.none() | st.integers(1, 6)) for _ in candidates]
    dealt = deal(candidates, counts)
    given_out = [key for keys in dealt for key in keys]
    assert len(given_out) == len(set(given_out))
    for keys, wanted, count in zip(dealt, candidates, counts, strict=True):
        assert set(keys) <= set(wanted)
        assert len(keys) <= (len(wanted) if count is None else count)
        if count is None or len(keys) < count:
            assert set(wanted) <= set(given_out)


@given(
    st.lists(st.integers(1, 30), min_size=1, max_size=3),
    st.integers(1, 5),
    st.integers(1, 12),
    st.integers(0, 4),
)
def test_online_gets_every_prompt_once_and_all_modes_the_measured_ones(
    counts: list[int], size: int, measure: int, every: int
) -> None:
    phases = [phase(f"p{i}", count) for i, count in enumerate(counts)]
    if min(counts) < measure:
        with pytest.raises(BenchError, match="fewer than --measure"):
            plan(phases, MODES, size=size, measure=measure, every=every, concurrency=1)
        return
    blocks = plan(phases, MODES, size=size, measure=measure, every=every, concurrency=1)
    online = [p.id for b in blocks if "online" in b.modes for p in b.prompts]
    assert online == [p.id for each in phases for p in each.prompts]
    for each in phases:
        measured = [p for b in blocks if b.phase == each.name and b.measured for p in b.prompts]
        assert measured == list(each.prompts[-measure:])
    for block in blocks:
        assert len(block.prompts) <= size
        assert set(block.modes) == set(MODES) or (not block.measured and every != 1)
        assert len(block.modes) == len(set(block.modes))


def test_baselines_get_one_block_in_so_many_before_the_window() -> None:
    blocks = plan([phase("p", 26)], MODES, size=2, measure=6, every=4, concurrency=1)
    assert [len(b.modes) for b in blocks] == [3, 1, 1, 1, 3, 1, 1, 1, 3, 1, 3, 3, 3]
    assert [b.measured for b in blocks] == [False] * 10 + [True] * 3
    none = plan([phase("p", 26)], MODES, size=2, measure=6, every=0, concurrency=1)
    assert [len(b.modes) for b in none] == [1] * 10 + [3] * 3


def test_only_what_no_other_mode_gets_is_sent_at_another_concurrency() -> None:
    blocks = plan(
        [phase("p", 26)], MODES, size=2, measure=6, every=4, concurrency=1, alone_concurrency=5
    )
    assert [b.concurrency for b in blocks] == [5 if len(b.modes) == 1 else 1 for b in blocks]
    assert {b.concurrency for b in blocks} == {1, 5}


def test_without_online_nothing_is_sent_that_no_mode_gets() -> None:
    blocks = plan([phase("p", 10)], ("none", "ngram"), size=2, measure=2, every=2, concurrency=1)
    assert [b.prompts[0].id for b in blocks] == ["p0", "p4", "p8"]


@pytest.mark.parametrize("count", [1, 2, 3, 5])
def test_each_mode_stands_equally_often_at_each_place_and_before_each_other(count: int) -> None:
    modes = [*MODES, "ngram", "suffix"][:count]
    orders = [order(modes, number) for number in range(2 * count)]
    for place in range(count):
        assert set(Counter(o[place] for o in orders).values()) == {2}
    for first, second in permutations(modes, 2):
        assert sum(o.index(first) < o.index(second) for o in orders) == count


def test_arrivals_are_poisson_and_the_same_on_every_server() -> None:
    times = arrival_times(4000, 2.0, seed=1, block=7)
    assert times == arrival_times(4000, 2.0, seed=1, block=7)
    assert times != arrival_times(4000, 2.0, seed=1, block=8)
    assert times == sorted(times)
    assert times[0] == 0.0
    gaps = [b - a for a, b in pairwise(times)]
    mean = sum(gaps) / len(gaps)
    spread = (sum((g - mean) ** 2 for g in gaps) / len(gaps)) ** 0.5
    assert mean == pytest.approx(0.5, rel=0.05)
    assert spread == pytest.approx(mean, rel=0.1)  # as only an exponential has it


@given(
    st.lists(st.floats(0, 5), min_size=1, max_size=40).map(sorted),
    st.integers(1, 5),
    st.floats(0.1, 20),
)
def test_bursts_are_added_to_the_arrivals_and_move_none(
    times: list[float], count: int, every_s: float
) -> None:
    found = with_bursts(times, Burst(count, every_s))
    assert len(found) == len(times)
    assert found == sorted(found)
    alone = Counter(times)
    end = found[-1]
    bursts = {every_s * (i + 1) for i in range(int(end / every_s) + 1)}
    for at, seen in Counter(found).items():
        if at < end:  # the last may be cut short
            assert seen == alone[at] + count * (at in bursts)
    assert {at for at in bursts if at < end} <= set(found)
