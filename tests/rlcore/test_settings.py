"""Where settings come from, and what is refused."""

from __future__ import annotations

import os
import tomllib
from pathlib import Path

import pytest

from rlcore.config_command import main as config
from rlcore.errors import UsageError
from rlcore.settings import LearnSettings, ServeSettings, load


@pytest.fixture(autouse=True)
def clean(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No setting of the machine that runs the tests."""
    for name in [name for name in os.environ if name.startswith("PACELINE_")]:
        monkeypatch.delenv(name)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.chdir(tmp_path)


def _file(text: str, name: str = "paceline.toml") -> None:
    Path(name).write_text(text)


def test_flags_win_over_environment_over_file_over_defaults(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert load(ServeSettings, []).port == 8000
    _file("port = 1\n[learning]\nseed = 1\n")
    assert load(ServeSettings, []).port == 1
    assert load(ServeSettings, []).learning.seed == 1
    monkeypatch.setenv("PACELINE_PORT", "2")
    monkeypatch.setenv("PACELINE_LEARNING__SEED", "2")
    assert load(ServeSettings, []).port == 2
    assert load(ServeSettings, []).learning.seed == 2
    settings = load(ServeSettings, ["--port", "3", "--learning.seed", "3"])
    assert (settings.port, settings.learning.seed) == (3, 3)


def test_a_named_file_takes_the_place_of_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    _file("port = 1\n")
    _file("port = 2\n", "other.toml")
    assert load(ServeSettings, ["--config", "other.toml"]).port == 2
    assert load(ServeSettings, ["--config=other.toml"]).port == 2
    monkeypatch.setenv("PACELINE_CONFIG", "other.toml")
    assert load(ServeSettings, []).port == 2
    with pytest.raises(UsageError, match="no configuration file 'none'"):
        load(ServeSettings, ["--config", "none"])


def test_what_follows_the_dashes_is_vllms(monkeypatch: pytest.MonkeyPatch) -> None:
    words = ["--tensor-parallel-size", "2", "--seed", "9"]
    settings = load(ServeSettings, ["--port", "3", "--", *words])
    assert (settings.port, settings.engine_args) == (3, words)
    monkeypatch.setenv("PACELINE_ENGINE_ARGS", "--seed 1")
    assert load(ServeSettings, []).engine_args == ["--seed", "1"]


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--prot", "1"], "unrecognized arguments: --prot"),
        (["--port", "http"], "--port: .*integer"),
        (["--port", "0"], "--port: .*greater than or equal to 1"),
        (["--speculative-tokens", "17"], "--speculative-tokens: .*16"),
        (["--host", "0.0.0.0"], "listening on 0.0.0.0 needs --api-key"),
        (["--host", "example.org"], "needs --api-key"),
        (["--host", "0.0.0.0", "--api-key", ""], "needs --api-key"),
        (["--api-key", "  "], "--api-key: an empty key guards nothing"),
        (["--learner", "tcp://10.0.0.1:5000"], "--learner: .*paceline keys curve"),
        (["--learner", "elsewhere"], "--learner: .*not an address"),
        (["--", "--api-key=hidden"], "--api-key is not used; give it before the --"),
        (["--", "--served_model_name", "x"], "--served-model-name is not used"),
        (["--", "--speculative-config={}"], "give --draft"),
    ],
)
def test_refusals_are_one_line(argv: list[str], message: str) -> None:
    with pytest.raises(UsageError, match=message) as caught:
        load(ServeSettings, argv)
    assert "\n" not in str(caught.value)
    assert "hidden" not in str(caught.value)


def test_an_empty_variable_is_an_unset_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """As compose files write them. An empty key must not open a server to the network."""
    monkeypatch.setenv("PACELINE_API_KEY", "")
    monkeypatch.setenv("PACELINE_HOME", "")
    assert load(ServeSettings, []).home == Path.home() / ".cache" / "paceline"
    with pytest.raises(UsageError, match="needs --api-key"):
        load(ServeSettings, ["--host", "0.0.0.0"])


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.9", "::1", "localhost"])
def test_loopback_needs_no_key(host: str) -> None:
    assert load(ServeSettings, ["--host", host]).api_key is None


def test_the_network_needs_a_key() -> None:
    settings = load(ServeSettings, ["--host", "0.0.0.0", "--api-key", "secret"])
    assert settings.api_key is not None
    assert settings.api_key.get_secret_value() == "secret"


def test_a_learner_stays_on_its_machine() -> None:
    assert load(LearnSettings, ["--bind", "tcp://127.0.0.1:5000"]).bind == "tcp://127.0.0.1:5000"
    with pytest.raises(UsageError, match=r"--bind: .*not encrypted"):
        load(LearnSettings, ["--bind", "tcp://0.0.0.0:5000"])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("prot = 1", "--prot: Extra inputs"),
        ("[learning]\nsead = 1", r"--learning\.sead: Extra inputs"),
        ("seed = 1", "--seed: Extra inputs"),
        ("port = ", r"paceline\.toml: Invalid value"),
    ],
)
def test_unknown_keys_in_the_file_are_refused(text: str, message: str) -> None:
    _file(text)
    with pytest.raises(UsageError, match=message):
        load(ServeSettings, [])


def test_commands_share_one_file() -> None:
    """The embedded learner starts in the server's working folder and reads the server's file."""
    _file('port = 1\nspeculative_tokens = 5\nbind = "tcp://127.0.0.1:5000"\n[learning]\nseed = 3\n')
    assert load(ServeSettings, []).port == 1
    learner = load(LearnSettings, [])
    assert (learner.speculative_tokens, learner.seed) == (5, 3)
    assert learner.bind == "tcp://127.0.0.1:5000"
    assert load(LearnSettings, ["--seed", "4"]).seed == 4
    _file("prot = 1")
    with pytest.raises(UsageError, match="--prot"):
        load(LearnSettings, [])


@pytest.mark.parametrize("command", ["serve", "learn"])
def test_config_prints_what_can_be_read_back(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert config([command, "--speculative-tokens", "7"]) == 0
    printed = capsys.readouterr().out
    assert tomllib.loads(printed)["speculative_tokens"] == 7
    _file(printed)
    assert config([command]) == 0
    assert capsys.readouterr().out == printed


def test_config_never_prints_the_key(capsys: pytest.CaptureFixture[str]) -> None:
    assert config(["--api-key", "sesame", "--admin-key", "sesame2"]) == 0
    assert "sesame" not in capsys.readouterr().out


def test_a_file_that_was_read_is_not_read_again_by_settings_made_without_flags(tmp_path):
    path = tmp_path / "serve.toml"
    path.write_text("port = 1234\n")
    assert load(ServeSettings, ["--config", str(path)]).port == 1234
    assert ServeSettings().port == 8000
