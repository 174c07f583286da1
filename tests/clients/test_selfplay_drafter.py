"""The drafter's recordings: divided among servers, made once, and learned from in their order."""

from __future__ import annotations

from pathlib import Path

import pytest

import clients.process
from clients.selfplay import drafter, recorded
from clients.selfplay.recorded import divide
from clients.workload import read_workload
from tests.clients.target import fake_paceline


def test_tokens_cores_and_seeds_are_divided_and_nothing_is_shared(tmp_path: Path) -> None:
    parts = divide(tmp_path, 3, 100, 7, [0, 1, 4, 5])
    assert sum(part.tokens for part in parts) == 100
    assert max(part.tokens for part in parts) - min(part.tokens for part in parts) <= 1
    assert [part.cores for part in parts] == [(0, 5), (1,), (4,)]
    assert [part.seed for part in parts] == [7, 8, 9]
    for name in ("home", "recording", "partial", "prompts", "endpoint"):
        assert len({getattr(part, name) for part in parts}) == 3
    assert parts[0].recording.name == "self-0.traces"


def test_a_server_alone_is_bound_to_no_core(tmp_path: Path) -> None:
    (part,) = divide(tmp_path, 1, 100, 0, [0, 1])
    assert (part.tokens, part.cores) == (100, ())


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--servers", "0"], "--servers must be above 0"),
        (["--servers", "3"], "--servers 3: there are 2 cores"),
        (["--tokens", "-1"], "--tokens must be above 0"),
        (["--passes", "nan"], "--passes must be above 0"),
        (["--recording", "none.traces"], "there is no recording none.traces"),
        (["--out", "."], "exists; give --out a new folder"),
    ],
)
def test_what_cannot_be_done_is_refused_before_anything_is_started(
    words: list[str],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(drafter, "usable_cores", lambda: [0, 1])
    with pytest.raises(SystemExit):
        drafter.parse(["--out", "new", "--work", "work", *words])
    assert message in capsys.readouterr().err.splitlines()[-1]


@pytest.fixture
def words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Flags of a run with two servers, none of whose commands is real."""
    script = fake_paceline(tmp_path)
    for module in (clients.process, recorded, drafter):
        monkeypatch.setattr(module, "console_script", lambda: script)
    for module in (recorded, drafter):
        monkeypatch.setattr(module, "usable_cores", lambda: [0, 1])
    work = tmp_path / "work"
    return ["--work", str(work), "--servers", "2", "--tokens", "300", "--concurrency", "3"]


def test_two_servers_record_once_and_both_recordings_are_learned_from(
    tmp_path: Path, words: list[str]
) -> None:
    work = tmp_path / "work"
    assert drafter.main([*words, "--out", str(tmp_path / "first")]) == 0
    said = [(work / f"home-{i}.log").read_text() for i in range(2)]
    assert ["bound to 0" in said[0], "bound to 1" in said[1]] == [True, True]
    assert "'--seed', '1'" in said[1]
    prompts = [read_workload(work / f"prompts-{i}.jsonl") for i in range(2)]
    assert not {p.key for p in prompts[0]} & {p.key for p in prompts[1]}
    learned = (tmp_path / "first" / "argv").read_text().splitlines()
    replays = [learned[i + 1] for i, word in enumerate(learned) if word == "--replay"]
    assert replays == [str(work / f"self-{i}.traces") for i in range(2)]

    (work / "self-1.traces").unlink()
    assert drafter.main([*words, "--out", str(tmp_path / "second")]) == 0
    assert (work / "home-0.log").read_text() == said[0]  # was not started again
    assert (work / "home-1.log").read_text() != said[1]
    again = read_workload(work / "prompts-1.jsonl")
    assert not {p.key for p in prompts[0]} & {p.key for p in again}


def test_a_server_that_fails_costs_its_own_recording_only(
    tmp_path: Path,
    words: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("FAKE_home-0", "refuse")
    monkeypatch.setattr("clients.selfplay.traffic.GIVE_UP_AFTER", 2)
    assert drafter.main([*words, "--out", str(tmp_path / "out")]) == 2
    assert "fails again and again: Error code: 500" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
    work = tmp_path / "work"
    assert [path.name for path in sorted(work.glob("self-*.traces"))] == ["self-1.traces"]


def test_given_recordings_are_learned_from_with_no_server(tmp_path: Path, words: list[str]) -> None:
    files = [tmp_path / "a.traces", tmp_path / "b.traces"]
    for file in files:
        file.touch()
    given = ["--recording", *map(str, files)]
    assert drafter.main([*words, *given, "--out", str(tmp_path / "out")]) == 0
    learned = (tmp_path / "out" / "argv").read_text().splitlines()
    assert [learned[i + 1] for i, w in enumerate(learned) if w == "--replay"] == list(
        map(str, files)
    )
    assert not (tmp_path / "work").exists()
