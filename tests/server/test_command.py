"""The embedded learner learns as the server was told to, wherever that was said."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from rlcore.home import Home
from rlcore.settings import LearningOptions, LearnSettings, ServeSettings, load
from server.command import _learner_arguments


@pytest.fixture(autouse=True)
def clean(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No setting of the machine that runs the tests."""
    for name in [name for name in os.environ if name.startswith("PACELINE_")]:
        monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)


def learner_of(argv: list[str], tmp_path: Path) -> tuple[ServeSettings, LearnSettings]:
    """What a server's flags come to, for it and for the learner that it starts."""
    served = load(ServeSettings, argv)
    home = Home(tmp_path / "home")
    words = _learner_arguments(served, home, tmp_path / "target", "ipc:///tmp/learner")
    return served, load(LearnSettings, words)


def test_the_learner_reads_the_file_that_the_server_was_given(tmp_path: Path) -> None:
    Path("paceline.toml").write_text("[learning]\nunroll = 7\npublish_interval_s = 5\nseed = 1\n")
    Path("other.toml").write_text(
        'port = 9000\ndraft = "none"\nengine_args = ["--seed", "1"]\nlog_json = true\n'
        "speculative_tokens = 5\n[learning]\nseed = 2\nlr_matrix = 0.5\n"
    )
    served, learner = learner_of(["--config", "other.toml"], tmp_path)
    assert (learner.seed, learner.lr_matrix, learner.speculative_tokens) == (2, 0.5, 5)
    assert learner.config_file == served.config_file == tmp_path / "other.toml"
    for name in LearningOptions.model_fields:
        assert vars(learner)[name] == vars(served.learning)[name], name


def test_a_broken_file_that_the_server_was_not_given_does_not_stop_the_learner(
    tmp_path: Path,
) -> None:
    Path("paceline.toml").write_text("nonsense = ")
    Path("other.toml").write_text("[learning]\nseed = 2\n")
    _, learner = learner_of(["--config", "other.toml"], tmp_path)
    assert learner.seed == 2


def test_the_servers_flags_win_over_its_file_in_the_learner_too(tmp_path: Path) -> None:
    Path("paceline.toml").write_text('log_json = true\nlog_level = "ERROR"\n[learning]\nseed = 1\n')
    flags = ["--no-log-json", "--log-level", "INFO", "--learning.seed", "3"]
    _, learner = learner_of(flags, tmp_path)
    assert (learner.log_json, learner.log_level, learner.seed) == (False, "INFO", 3)


def test_without_a_file_there_is_none_to_pass_on(tmp_path: Path) -> None:
    _, learner = learner_of([], tmp_path)
    assert learner.config_file is None
