"""The installed command: what it imports, how it fails, what it writes where."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

from rlcore import cli

SCRIPT = Path(sys.executable).with_name("paceline")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A working folder with packages named like ours in it, which must not be taken for ours."""
    for name in ("server", "learner", "rlcore"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("raise RuntimeError('a decoy was imported')\n")
    return tmp_path


def paceline(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    kept = {k: v for k, v in os.environ.items() if not k.startswith("PACELINE_")}
    return subprocess.run(
        [SCRIPT, *words],
        cwd=folder,
        env={**kept, "PACELINE_HOME": str(folder / "home")},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["surf"],
            "unknown command 'surf'; there are: bench, chat, config, keys, learn, models, record, "
            "rl-eval, rl-train, serve, top",
        ),
        (["serve", "--host", "0.0.0.0"], "listening on 0.0.0.0 needs --api-key"),
        (["serve", "--target", "./nowhere"], "there is no model folder ./nowhere"),
        (["learn", "--bind", "tcp://10.1.1.1:1"], "not encrypted"),
        (["learn", "--replay", "none.traces"], "--out: Field required"),
        (["learn", "--replay", "none.traces", "--out", "new"], "cannot read none.traces"),
        (["record"], "--out: Field required"),
        (["models", "--verify"], "paceline models --make"),
        (["config", "surf"], "config of 'surf'?"),
    ],
)
def test_a_mistake_is_one_line_and_code_2(folder: Path, words: list[str], message: str) -> None:
    done = paceline(folder, *words)
    lines = done.stderr.strip().splitlines()
    assert done.returncode == 2, done.stderr
    assert lines[-1].startswith("paceline: ")
    assert message in lines[-1]
    assert sum(line.startswith("paceline: ") for line in lines) == 1
    assert "Traceback" not in done.stderr
    assert "decoy" not in done.stderr


def test_help_and_version(folder: Path) -> None:
    done = paceline(folder, "--help")
    assert done.returncode == 0
    for name, summary in cli.SUMMARIES.items():
        assert f"{name} " in done.stdout
        assert summary in done.stdout
    assert paceline(folder, "--version").stdout.startswith("paceline ")
    for name in cli.SUMMARIES:
        program = name if name.startswith("rl-") else f"paceline {name}"  # scripts of their own
        assert paceline(folder, name, "--help").stdout.startswith(f"usage: {program}")


def test_help_imports_no_command() -> None:
    script = (
        "import sys; from rlcore.cli import main; main(['--help'])\n"
        "names = {name.split('.')[0] for name in sys.modules}\n"
        "sys.exit(', '.join(names & {'server', 'learner', 'torch', 'vllm', 'pydantic'}))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.stderr.strip() == ""


def test_models_lists_what_is_there(folder: Path) -> None:
    model = folder / "home" / "models" / "mine"
    model.mkdir(parents=True)
    (model / "config.json").write_text("{}")
    done = paceline(folder, "models")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("model  mine")


def test_an_interrupt_is_130(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(argv: list[str]) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(EntryPoint, "load", lambda _: interrupted)
    assert cli.main(["serve"]) == 130


def test_modules_log_as_their_command_says() -> None:
    """Loggers are made when a module is imported, before the command knows how to log."""
    script = (
        "from rlcore.log import get_logger, setup_logging\n"
        "log = get_logger('server')\n"
        "setup_logging('server', True, 'WARNING')\n"
        "log.info('hidden')\n"
        "log.warning('shown', tokens=3)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout == ""
    line = json.loads(done.stderr)
    assert (line["event"], line["component"], line["tokens"]) == ("shown", "server", 3)
