"""Prompt files: what is read, what is refused, and that no prompt is sent twice."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clients.workload import Prompt, WorkloadError, load_prompts, read_workload, without_repeats


def write(path: Path, *rows: object) -> Path:
    path.write_text(
        "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8"
    )
    return path


def row(name: str, *turns: str) -> dict[str, object]:
    return {"id": name, "source": "here", "turns": list(turns)}


def test_reads_what_the_files_hold(tmp_path: Path) -> None:
    path = write(
        tmp_path / "a.jsonl",
        {**row("1", "Grüße\u2028an", "und dann?"), "answer": "160"},
        row("2", "x"),
    )
    first, second = read_workload(path)
    assert first == Prompt("1", ("Grüße\u2028an", "und dann?"), "here", "160")
    assert second.answer is None


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('{"id": "1", "turns": ["a"]}\n{"id": "2", "turns": []}\n', "a.jsonl:2"),
        ('\n{"id": "1"}\n', "a.jsonl:2"),
        ('{"id": "1", "turns": ["  "]}\n', "empty"),
        ('{"id": 1, "turns": ["a"]}\n', "a.jsonl:1"),
        ("not json\n", "a.jsonl:1"),
        ("\n", "no prompts"),
    ],
)
def test_refuses_a_bad_file_by_line(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(text)
    with pytest.raises(WorkloadError, match=said):
        read_workload(path)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(WorkloadError, match=r"gone\.jsonl: No such file"):
        load_prompts([tmp_path / "gone.jsonl"])


def test_the_same_text_in_two_files_is_sent_once(tmp_path: Path) -> None:
    a = write(tmp_path / "a.jsonl", row("a1", "How  many\neggs?"), row("a2", "Other"))
    b = write(tmp_path / "b.jsonl", row("b1", "How many eggs?", "And then?"), row("b2", "New"))
    chosen = load_prompts([a, b])
    assert sorted(p.id for p in chosen.prompts) == ["a1", "a2", "b2"]
    assert chosen.duplicates == 1
    assert chosen.files == ("a.jsonl", "b.jsonl")
    assert load_prompts([a, a]).duplicates == 2


def test_one_id_for_two_texts_is_refused() -> None:
    with pytest.raises(WorkloadError, match="the id x"):
        without_repeats([Prompt("x", ("a",)), Prompt("x", ("b",))])


def test_the_seed_fixes_the_order(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", *(row(str(i), f"prompt {i}") for i in range(50)))
    first, again, other = (load_prompts([path], seed).prompts for seed in (1, 1, 2))
    assert first == again
    assert first != other
    assert first != tuple(read_workload(path))
    assert set(first) == set(other)


@given(st.lists(st.sampled_from(["a", "b", " a ", "a b", "a  b", "c"]), max_size=30))
def test_no_key_comes_twice_and_none_is_lost(texts: list[str]) -> None:
    prompts = [Prompt(str(i), (text,)) for i, text in enumerate(texts)]
    kept = without_repeats(prompts)
    keys = [prompt.key for prompt in kept]
    assert len(keys) == len(set(keys))
    assert set(keys) == {prompt.key for prompt in prompts}


def test_messages_follow_the_turns() -> None:
    prompt = Prompt("1", ("one", "two"))
    assert prompt.messages() == [{"role": "user", "content": "one"}]
    assert prompt.messages(["reply"]) == [
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": "reply"},
        {"role": "user", "content": "two"},
    ]
    with pytest.raises(ValueError, match="all of them answered"):
        prompt.messages(["reply", "reply"])
