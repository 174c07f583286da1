"""The bench's options and modes: mistakes are found before anything starts, flags reach their servers."""

from __future__ import annotations

from typing import Any

import pytest

from clients.bench.command import main, parse
from clients.bench.common import BenchError
from clients.bench.modes import check_draft, chosen_modes, make_server
from clients.process import ServerProcess
from tests.clients.test_bench_plan import write


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--modes", "none,fast"], "there are none, ngram, suffix, frozen, online"),
        (["--modes", "none,none"], "twice"),
        (["--modes", "none,frozen", "--draft", "none"], "needs --draft FOLDER"),
        (["--modes", "online", "--draft", "nowhere"], "no safetensors"),
        (["--modes", "none", "--measure", "9"], "fewer than --measure 9"),
        (["--modes", "none", "--target", "nowhere"], "give 'embedded' or a Hugging Face"),
    ],
)
def test_a_mistake_is_one_line_before_anything_starts(
    tmp_path: Any, capsys: pytest.CaptureFixture[str], words: list[str], said: str
) -> None:
    file = write(tmp_path / "a.jsonl", *(f"prompt {i}" for i in range(8)))
    assert main(["--phase", str(file), "--measure", "4", *words]) == 2
    error = capsys.readouterr().err.strip()
    assert error.startswith("paceline: ")
    assert said in error
    assert len(error.splitlines()) == 1


@pytest.mark.parametrize(
    "words",
    [
        ["--concurrency", "0"],
        ["--rate", "-1"],
        ["--measure", "0"],
        ["--burst", "4:2", "--block", "50"],
        ["--burst", "4:0", "--rate", "1", "--block", "50"],
        ["--burst", "4:2", "--rate", "1", "--block", "5"],
    ],
)
def test_impossible_numbers_are_refused(words: list[str]) -> None:
    with pytest.raises(SystemExit):
        parse(["--phase", "a.jsonl", *words])


def test_a_home_with_earlier_traffic_is_refused(tmp_path: Any) -> None:
    (tmp_path / "drafts").mkdir()
    with pytest.raises(SystemExit):
        parse(["--phase", "a.jsonl", "--home", str(tmp_path)])


def test_suffix_without_its_package_is_left_out_with_a_line(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("clients.bench.modes.find_spec", lambda name: None)
    names, skipped = chosen_modes("none,suffix,online")
    assert names == ["none", "online"]
    assert len(skipped) == 1
    assert "arctic-inference" in skipped[0]
    with pytest.raises(BenchError, match="arctic-inference"):
        chosen_modes("suffix")


def test_all_servers_get_the_same_engine_flags(tmp_path: Any) -> None:
    words = [
        "--phase",
        "a.jsonl",
        "--draft",
        "d",
        "--",
        "--learning.seed",
        "3",
        "--",
        "--max-model-len",
        "512",
    ]
    args = parse(words)
    made = {
        mode: make_server(mode, args, tmp_path / mode, tmp_path / "target")
        for mode in ("none", "ngram", "suffix", "frozen", "online")
    }
    for server in made.values():
        flags = server.flags
        assert flags[flags.index("--kv-cache-memory-bytes") + 1] == str(2**29)
        assert flags[flags.index("--max-num-seqs") + 1] == "32"
        assert flags[flags.index("--max-model-len") + 1] == "512"
        assert str(tmp_path / "target") in flags
    for mode, learner in (("frozen", "off"), ("online", "local")):
        flags = made[mode].flags
        ours, engine = flags[: flags.index("--")], flags[flags.index("--") + 1 :]
        assert ours[ours.index("--learner") + 1] == learner
        assert ours[-2:] == ["--learning.seed", "3"]
        assert "--max-model-len" in engine
    assert "--speculative-config" not in made["none"].flags
    assert '"ngram"' in made["ngram"].flags[-1]
    assert '"suffix"' in made["suffix"].flags[-1]
    assert "--home" not in made["none"].command()
    assert isinstance(made["none"], ServerProcess)


def test_an_untrained_draft_is_no_frozen_one(tmp_path: Any) -> None:
    check_draft("none", ["none", "online"])
    (tmp_path / "model.safetensors").touch()
    check_draft(str(tmp_path), ["frozen"])
