"""An evaluation reads a run's file, and takes no flag that it would not use."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlcore.errors import UsageError
from rlcore.rl.eval_command import check_flags, main
from rlcore.rl.run_file import flags_of, given_flags, presets, with_file
from rlcore.rl.settings import RLEvalSettings, RLTrainSettings
from rlcore.settings import load


def loaded(*argv: str) -> RLEvalSettings:
    return load(RLEvalSettings, with_file(list(argv)), "rl-eval")


def wrong(*argv: str) -> str:
    with pytest.raises(UsageError) as error:
        main(list(argv))
    message = str(error.value)
    assert "\n" not in message
    return message


def a_file(folder: Path, text: str) -> str:
    path = folder / "run.toml"
    path.write_text(text)
    return str(path)


@pytest.mark.parametrize("name", presets())
def test_a_run_s_file_is_an_evaluation_s_too(name):
    run = load(RLTrainSettings, with_file([name]), "rl-train")
    settings = loaded(name)
    for shared in ("concurrency", "evaluate_tasks", "evaluate_temperature", "environment"):
        assert getattr(settings, shared) == getattr(run, shared)
    assert settings.sampling.max_tokens == run.sampling.max_tokens
    assert settings.engine.serve_flags == run.engine.serve_flags


def test_there_is_no_flag_that_is_not_used():
    own = flags_of(RLEvalSettings)
    assert "json-file" in own
    assert not own & {"out", "updates", "optimiser.lr", "sampling.temperature", "recipe", "seed"}
    assert own - {"json-file"} <= flags_of(RLTrainSettings)


@pytest.mark.parametrize(
    "text",
    ["updatse = 3\n", "[engine]\ndtyp = 'float32'\n", "[environment]\nlr = 3\n"],
)
def test_a_key_that_neither_knows_is_named(tmp_path, text):
    key = text.split("=")[0].split("\n")[-1].strip()
    assert key in wrong("somewhere", a_file(tmp_path, text))


@pytest.mark.parametrize(
    "flag",
    [
        "--updates",
        "--optimiser.lr",
        "--sampling.temperature",
        "--no-balance",
        "--out=x",
        "--resume",
    ],
)
def test_a_flag_of_training_is_refused_in_one_line(flag):
    line = wrong("somewhere", "quickstart", flag, "1")
    assert flag.partition("=")[0] in line
    assert "rl-train" in line


def test_flags_of_an_engine_that_is_started_do_not_go_with_a_server():
    line = wrong("http://127.0.0.1:1", "quickstart", "--engine.dtype", "bfloat16")
    assert "--engine.dtype" in line
    check_flags(["engine.api-key", "engine.request-deadline-s", "model"], remote=True)
    check_flags(["engine.dtype", "engine.where"], remote=False)


def test_what_is_measured_is_named_once():
    assert "--model" in wrong("somewhere", "quickstart", "--model", "elsewhere")
    assert "--engine.url" in wrong("http://127.0.0.1:1", "quickstart", "--engine.url", "http://x")


def test_flags_are_found_among_words():
    words = ["run.toml", "--a", "1", "--b.c=2", "--no-d", "--", "--max-num-seqs", "3"]
    assert given_flags(words) == ["a", "b.c", "no-d"]
