"""The faults: each breaks one thing under load and says what became of the requests, and of the thing.

Every function takes the server and its load, and gives back figures. None of them repairs what the server
has to repair by itself.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import psutil

from clients.bench.chaos_load import Load
from clients.bench.chaos_watch import engine_of, ready, totals, until
from clients.process import ServerProcess

START_DEADLINE = 240.0
"""Seconds for an engine to be up again, on a machine that is busy."""

WEIGHTS = "model.safetensors"

Figures = dict[str, Any]


def engine_killed(server: ServerProcess, load: Load, times: int) -> Figures:
    """SIGKILL to the process that runs the model: an answer for each request, and a new engine."""
    waits, noticed = [], []
    before = server.status()["draft"]["live"]
    for _ in range(times):
        load.wait_for_served(2, START_DEADLINE)
        engine_of(server).kill()
        noticed.append(until(lambda: not ready(server), "readiness to end", 30, 0.02))
        waits.append(until(lambda: ready(server), "the engine to be back", START_DEADLINE))
    load.wait_for_served(2, START_DEADLINE)
    return {
        "times": times,
        "noticed_s": [round(s, 2) for s in noticed],
        "back_after_s": [round(s, 1) for s in waits],
        "draft_before": before,
        "draft_after": server.status()["draft"]["live"],
    }


def learner_killed(server: ServerProcess, load: Load, times: int) -> Figures:
    """SIGKILL to the learner, each time as soon as it is back; the server waits longer each time."""
    back = []
    for _ in range(times):
        learner = server.learner()
        while learner is None:
            time.sleep(0.1)
            learner = server.learner()
        with suppress(psutil.NoSuchProcess):
            learner.kill()
        back.append(until(partial(_other, server, learner.pid), "a new learner", 120))
    until(lambda: server.status()["learner"]["alive"], "the learner to report", 240)
    report = server.status()["learner"]
    return {
        "times": times,
        "back_after_s": [round(s, 1) for s in back],
        "updates": report.get("updates"),
        "received": report.get("received"),
    }


def _other(server: ServerProcess, pid: int) -> bool:
    learner = server.learner()
    return learner is not None and learner.pid != pid


def weights_damaged(server: ServerProcess, load: Load) -> Figures:
    """A version's file cut, exchanged for another one, and removed, between its notice and its load."""
    found = {}
    live = server.status()["draft"]["live"]
    for how, break_it in DAMAGES.items():
        version = _copied(server, live)
        break_it(_store(server) / f"{version:06d}" / WEIGHTS)
        answer = server.post(f"/v1/paceline/drafts/{version}/activate")
        found[how] = {"status": answer.status_code, "why": answer.json()["error"]["message"]}
        load.wait_for_served(1, 120)
        shutil.rmtree(_store(server) / f"{version:06d}")
    status = server.status()
    return {
        "answers": found,
        "draft_before": live,
        "draft_after": status["draft"]["live"],
        "failed": status["swaps"]["failed"],
    }


def live_weights_damaged(server: ServerProcess, load: Load) -> Figures:
    """The live version's own file is cut, and then the engine dies: it cannot start with it again."""
    first = server.status()["draft"]["live"]
    version = _copied(server, first)
    server.post(f"/v1/paceline/drafts/{version}/activate").raise_for_status()
    load.wait_for_served(1, 120)
    _cut(_store(server) / f"{version:06d}" / WEIGHTS)
    load.wait_for_served(1, 120)
    engine_of(server).kill()
    until(lambda: not ready(server), "readiness to end", 30, 0.02)
    waited = until(lambda: ready(server), "the engine to be back", START_DEADLINE)
    load.wait_for_served(2, 120)
    return {
        "damaged": version,
        "draft_before": first,
        "draft_after": server.status()["draft"]["live"],
        "back_after_s": round(waited, 1),
    }


def _cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def _exchange(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1000:] = bytes(1000)  # as long, and well formed
    path.write_bytes(content)


DAMAGES: dict[str, Callable[[Path], None]] = {
    "cut": _cut, "exchanged": _exchange, "removed": Path.unlink
}  # fmt: skip


def disk_full(server: ServerProcess, load: Load) -> Figures:
    """Not a byte more in the home folder's drafts and learner state: see ``small_disks``."""
    home = server.home
    until(lambda: server.status()["learner"].get("updates", 0) > 0, "an update", 300)
    before = server.status()
    live = before["draft"]["live"]
    version = _copied(server, live)
    fillers = [_fill(home / name) for name in ("drafts", "learner")]
    answer = server.post(f"/v1/paceline/drafts/{version}/activate")
    moment = time.monotonic()
    load.wait_for_served(8, 240)
    time.sleep(4)  # a checkpoint is tried meanwhile
    during = server.status()
    for filler in fillers:
        filler.unlink()
    until(lambda: server.status()["learner"]["alive"], "the learner to report", 240)
    back = server.post(f"/v1/paceline/drafts/{live}/activate")
    load.wait_for_served(2, 120)
    return {
        "activate": answer.status_code,
        "activate_after": back.status_code,
        "served_while_full": load.figures(moment)["served"],
        "same_learner": during["learner"].get("pid") == before["learner"].get("pid"),
        "learner_alive": during["learner"]["alive"],
        "draft_after": server.status()["draft"]["live"],
    }


@contextmanager
def small_disks(home: Path, megabytes: int) -> Iterator[None]:
    """Disks of their own, in memory, for the drafts and the learner; raises OSError where refused."""
    mounted: list[Path] = []
    try:
        for name in ("drafts", "learner"):
            folder = home / name
            folder.mkdir(parents=True, exist_ok=True)
            command = ["mount", "-t", "tmpfs", "-o", f"size={megabytes}m", "tmpfs", str(folder)]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode != 0:
                raise OSError(f"cannot mount a small disk: {done.stderr.strip()}")
            mounted.append(folder)
        yield
    finally:
        for folder in mounted:
            subprocess.run(["umount", "-l", str(folder)], check=False)


def _fill(folder: Path) -> Path:
    """A file that takes all that is left."""
    filler = folder / ".filler"
    with open(filler, "wb", buffering=0) as file, suppress(OSError):
        while True:
            file.write(bytes(1 << 16))
    return filler


def clock_set_back(server: ServerProcess, load: Load, clock: Path, seconds: float) -> Figures:
    """Every process's ``time.time`` goes back (see ``shifted_clock``)."""
    before = server.status()
    moment = time.monotonic()
    clock.write_text(str(-seconds))
    load.wait_for_served(6, 240)
    during = server.status()
    live = during["draft"]["live"]
    version = _copied(server, live)
    swap = server.post(f"/v1/paceline/drafts/{version}/activate")
    server.post(f"/v1/paceline/drafts/{live}/activate")
    load.wait_for_served(4, 240)
    after = server.status()
    clock.write_text("0")
    return {
        "back_s": seconds,
        "uptime_s": [round(s["uptime_s"]) for s in (before, during)],
        "served_meanwhile": load.figures(moment)["served"],
        "activate": swap.status_code,
        "learner_alive": after["learner"]["alive"],
        "learner_age_s": after["learner"]["age_s"],
        "traces_sent": after["traces"]["sent"] - before["traces"]["sent"],
    }


SITE = """
import os, time
_real, _path = time.time, os.environ["CHAOS_CLOCK"]
def _shifted():
    try:
        with open(_path) as file:
            return _real() + float(file.read() or 0)
    except OSError:
        return _real()
time.time = _shifted
time.time_ns = lambda: int(_shifted() * 1e9)
"""


def shifted_clock(folder: Path) -> tuple[Path, dict[str, str]]:
    """A file that says by how many seconds ``time.time`` is off, and the environment that obeys it."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "sitecustomize.py").write_text(SITE)
    clock = folder / "clock"
    clock.write_text("0")
    paths = [str(folder), *filter(None, [os.environ.get("PYTHONPATH")])]
    return clock, {"CHAOS_CLOCK": str(clock), "PYTHONPATH": os.pathsep.join(paths)}


def _store(server: ServerProcess) -> Path:
    (root,) = [p for p in (server.home / "drafts").iterdir() if p.is_dir()]
    return root


def _copied(server: ServerProcess, version: int) -> int:
    """The same drafter once more, as the next version."""
    root = _store(server)
    new = max(int(p.name) for p in root.iterdir() if p.name.isdigit()) + 1
    folder = root / f"{new:06d}"
    shutil.copytree(root / f"{version:06d}", folder)
    manifest = json.loads((folder / "manifest.json").read_text())
    (folder / "manifest.json").write_text(
        json.dumps(manifest | {"version": new, "parent": version})
    )
    return new


def total(server: ServerProcess, name: str) -> int:
    """One of the server's totals."""
    return int(totals(server.get("/metrics").text).get(name, 0))
