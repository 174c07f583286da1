"""A start that cannot succeed ends with one clear line, exit code 2 and no traceback."""

from __future__ import annotations

import os
import socket
import subprocess
from pathlib import Path

import msgspec
import pytest

from clients.process import console_script, free_port
from learner.drafters.eagle3 import Eagle3
from learner.target import Target
from rlcore.records.versions import DraftManifest
from rlcore.target import model_identity
from tests.conftest import Served
from tests.learner.tiny import HIDDEN, make_target

pytestmark = pytest.mark.slow

PREFIX = "paceline: "


def start_fails(*flags: str, deadline_s: float = 120.0) -> str:
    """The one line of a ``paceline serve`` that ends by itself, before any engine."""
    done = subprocess.run(
        [str(console_script()), "serve", *flags],
        stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=deadline_s, check=False,
        env={**os.environ, "HF_HUB_DISABLE_PROGRESS_BARS": "1"},
    )  # fmt: skip
    everything = done.stdout + done.stderr
    assert done.returncode == 2, everything
    assert "Traceback" not in everything
    assert "EngineCore" not in everything
    lines = [line for line in done.stderr.splitlines() if line.startswith(PREFIX)]
    assert len(lines) == 1, everything
    assert done.stderr.splitlines()[-1] == lines[0]
    return lines[0].removeprefix(PREFIX)


def home_flags(tmp_path: Path, target: Path | str) -> list[str]:
    return [
        "--home", str(tmp_path / "home"), "--target", str(target), "--port", str(free_port()),
        "--learner", "off",
    ]  # fmt: skip


@pytest.mark.on_server("eagle3")
def test_a_second_server_on_the_same_home_is_refused_by_name(served: Served) -> None:
    line = start_fails("--home", str(served.server.home), "--port", str(free_port()))
    assert str(served.server.home) in line
    assert "in use" in line
    assert str(served.server.pid) in line
    assert "--home" in line


def test_a_port_in_use_is_said_before_anything_is_loaded(tmp_path: Path, embedded_model: Path):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        flags = home_flags(tmp_path, embedded_model)
        line = start_fails(*flags, "--port", str(port))
    assert str(port) in line
    assert "--port" in line


def test_an_unknown_model_is_one_line_that_names_it(tmp_path: Path) -> None:
    line = start_fails(*home_flags(tmp_path, "nobody/no-such-model"))
    assert "nobody/no-such-model" in line
    assert "local folder" in line


def test_a_missing_folder_and_one_without_a_model_are_one_line(tmp_path: Path) -> None:
    line = start_fails(*home_flags(tmp_path, tmp_path / "nowhere"))
    assert str(tmp_path / "nowhere") in line
    (tmp_path / "empty").mkdir()
    line = start_fails(*home_flags(tmp_path, tmp_path / "empty"))
    assert "config.json" in line


def test_a_draft_that_does_not_fit_is_one_line_that_says_why(tmp_path: Path, embedded_model: Path):
    target = Target.open(embedded_model)
    flags = home_flags(tmp_path, embedded_model)

    other = tmp_path / "other"
    Eagle3.build(target, vocab_size=512).save(other)
    manifest = DraftManifest(0, None, "eagle3", "", "another-model-0123", 0, "learned")
    (other / "manifest.json").write_bytes(msgspec.json.encode(manifest))
    line = start_fails(*flags, "--draft", str(other))
    assert "another-model-0123" in line
    assert model_identity(embedded_model) in line

    make_target(tmp_path / "tiny")
    Eagle3.build(Target.open(tmp_path / "tiny"), vocab_size=40).save(tmp_path / "narrow")
    line = start_fails(*flags, "--draft", str(tmp_path / "narrow"))
    assert f"hidden size {HIDDEN}" in line

    missing = start_fails(*flags, "--draft", str(tmp_path / "nothing"))
    assert str(tmp_path / "nothing") in missing
