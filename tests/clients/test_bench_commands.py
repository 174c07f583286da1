"""``paceline bench`` and its sweep from the command line to JSON and plot, with small servers."""

from __future__ import annotations

import json
import re
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Self

import pytest

from clients.bench import command, report, sweep_report
from clients.process import ServerProcess
from tests.clients.stub import running
from tests.clients.test_bench_plan import write
from tests.clients.test_bench_runner import FakeServer


class Started(FakeServer):
    """Starts like a server process, and is described like the one in whose place it stands."""

    def __init__(self, home: Path) -> None:
        super().__init__()
        self.home = home
        self.start_seconds = 0.0
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        self._stack.enter_context(running(self))
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def command(self) -> list[str]:
        return ServerProcess(self.home).command()

    def status(self) -> dict[str, Any]:
        return {"draft": {"live": 1}}


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where servers would live; none is a real one."""
    monkeypatch.setattr(
        "clients.bench.session.make_server", lambda mode, args, home, target: Started(home)
    )
    monkeypatch.setattr("clients.bench.session.target_folder", lambda target, home: Path("model"))
    return tmp_path / "home"


def run(words: list[str], folder: Path, code: int = 0) -> dict[str, Any]:
    paths = ["--json", str(folder / "out.json"), "--plot", str(folder / "out.png")]
    assert command.main([*words, "--modes", "none,online", *paths]) == code
    assert (folder / "out.png").read_bytes().startswith(b"\x89PNG")
    found: dict[str, Any] = json.loads((folder / "out.json").read_text())
    return found


def documented(*docs: str | None) -> set[str]:
    return {name for doc in docs for name in re.findall(r"``(\w+)``", doc or "")}


def test_a_sweep_goes_from_prompts_to_figures(
    home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = [
        str(write(tmp_path / f"{name}.jsonl", *(f"go {name} w w {i}" for i in range(8))))
        for name in "ab"
    ]
    words = ["sweep", "--workload", *files, "--home", str(home)]
    found = run([*words, "--concurrency", "1,3", "--per-level", "3", "--rounds", "1"], tmp_path)
    assert "12 prompts, 24 requests in 4 blocks" in capsys.readouterr().out
    assert [b["concurrency"] for b in found["blocks"]] == [1, 3, 3, 1]
    assert [(f["concurrency"], f["mode"], f["requests"]) for f in found["levels"]] == [
        (1, "none", 6), (1, "online", 6), (3, "none", 6), (3, "online", 6),
    ]  # fmt: skip
    online = found["levels"][-1]
    assert online["mean_k"]["value"] == pytest.approx(4 / 3)
    assert online["gap_s"]["values"] == 6 * 3
    assert found["levels"][0]["mean_k"] is None
    sources = {r["prompt_id"][0] for r in found["records"] if r["block"] < 2}
    assert sources == {"a", "b"}
    assert found.keys() - {"benchmark"} <= documented(sweep_report.__doc__)


def test_a_bench_goes_from_phases_to_figures(home: Path, tmp_path: Path) -> None:
    file = write(tmp_path / "a.jsonl", *(f"go w w {i}" for i in range(6)), "refuse it")
    words = ["--phase", str(file), "--home", str(home), "--measure", "7"]
    found = run([*words, "--block", "4", "--rate", "20", "--burst", "2:0.1"], tmp_path, code=1)
    assert sum(f["failed"] for f in found["figures"]) == 2
    assert found["options"]["burst"] == {"count": 2, "every_s": 0.1}
    assert found.keys() - {"benchmark"} <= documented(report.__doc__)
    assert found["final_status"] == {"draft": {"live": 1}}


def test_what_was_measured_is_written_when_a_server_ends(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ends = property(lambda server: len(server.bodies) < 4, lambda server, value: None)
    monkeypatch.setattr(Started, "alive", ends, raising=False)
    file = write(tmp_path / "a.jsonl", *(f"go w w {i}" for i in range(9)))
    words = ["sweep", "--workload", str(file), "--home", str(home), "--rounds", "1"]
    found = run([*words, "--concurrency", "2", "--per-level", "3"], tmp_path, code=2)
    assert len(found["samples"]) == 2
    assert "server ended" in found["stopped"]
    assert "stopped after 2 samples" in capsys.readouterr().err
