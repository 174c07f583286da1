"""The bench's options and modes: mistakes are found before anything starts, flags reach their servers."""

from __future__ import annotations

import json
from typing import Any

import pytest

from clients.bench.command import main, parse
from clients.bench.common import BenchError
from clients.bench.modes import check_draft, check_gguf, chosen_modes, make_server
from clients.process import ServerProcess
from tests.clients.test_bench_plan import write


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--modes", "none,fast"], "there are none, ngram, suffix, eagle3, llamacpp,"),
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


def test_llama_cpp_gets_the_cores_the_slots_and_its_drafter(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    gguf, head = tmp_path / "m.gguf", tmp_path / "head.gguf"
    gguf.touch()
    head.touch()
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {0, 1, 2})
    args = parse(["--phase", "a.jsonl", "--gguf", str(gguf), "--draft-gguf", str(head)])
    check_gguf(args, ["llamacpp-eagle3"])
    made = {
        mode: make_server(mode, args, tmp_path / mode, tmp_path / "target").flags
        for mode in ("llamacpp", "llamacpp-ngram", "llamacpp-eagle3")
    }
    for flags in made.values():
        assert flags[flags.index("--model") + 1] == str(gguf)
        assert flags[flags.index("--slots") + 1] == "32"
        assert flags[flags.index("--threads") + 1] == "3"
    assert not {"--ngram", "--draft-model"} & set(made["llamacpp"])
    assert "--ngram" in made["llamacpp-ngram"]
    flags = made["llamacpp-eagle3"]
    assert flags[flags.index("--draft-model") + 1] == str(head)
    assert flags[flags.index("--draft-tokens") + 1] == "3"


def test_files_that_llama_cpp_needs_are_asked_for_before_anything_starts(tmp_path: Any) -> None:
    missing = parse(["--phase", "a.jsonl", "--gguf", str(tmp_path / "none.gguf")])
    check_gguf(missing, ["none", "online"])
    with pytest.raises(BenchError, match="no such file"):
        check_gguf(missing, ["llamacpp"])
    (tmp_path / "m.gguf").touch()
    without = parse(["--phase", "a.jsonl", "--gguf", str(tmp_path / "m.gguf")])
    check_gguf(without, ["llamacpp-ngram"])
    with pytest.raises(BenchError, match="--draft-gguf"):
        check_gguf(without, ["llamacpp-eagle3"])
    other = parse(["--phase", "a.jsonl", "--target", str(tmp_path)])
    with pytest.raises(BenchError, match="--gguf"):
        check_gguf(other, ["llamacpp"])


def test_plain_vllm_with_a_drafter_drafts_with_the_folder_given(tmp_path: Any) -> None:
    with pytest.raises(BenchError, match="eagle3 needs --draft"):
        check_draft("auto", ["eagle3"])
    args = parse(["--phase", "a.jsonl", "--draft", str(tmp_path)])
    server = make_server("eagle3", args, tmp_path / "home", tmp_path / "target")
    config = json.loads(server.flags[server.flags.index("--speculative-config") + 1])
    assert config == {"method": "eagle3", "model": str(tmp_path), "num_speculative_tokens": 3}
