"""A killed learner costs no request, and resumes."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from clients.process import ServerProcess
from tests.conftest import Served

pytestmark = pytest.mark.slow


@pytest.mark.on_server("learning")
def test_a_killed_learner_costs_no_request_and_resumes(served: Served) -> None:
    server, home = served.server, served.server.home
    load = Load(server)
    try:
        first = until(server, lambda s: s["learner"].get("updates", 0) > 0, 240, load)
        wait_for(lambda: checkpointed_tokens(home) > 0, 60)
        saved = checkpointed_tokens(home)
        pid = first["learner"]["pid"]
        assert pid in [process.pid for process in server.children()]
        done_before = load.done
        psutil.Process(pid).send_signal(signal.SIGKILL)
        after = until(
            server,
            lambda s: s["learner"]["pid"] != pid and s["learner"]["tokens_seen"] > saved,
            120,
            load,
        )
    finally:
        load.stop()
    assert after["learner"]["received"] >= first["learner"]["received"] > 0
    assert load.failures == []
    assert load.done > done_before


def checkpointed_tokens(home: Path) -> int:
    """Trained positions in the newest checkpoint; 0 while there is none."""
    from rlcore.checkpoint import CheckpointError, load_checkpoint

    folder = next((home / "learner").glob("*/checkpoint"), None)
    try:
        found = load_checkpoint(folder) if folder else None
    except CheckpointError:
        return 0
    return 0 if found is None else int(found[1]["tokens_seen"])


def wait_for(true: Callable[[], bool], deadline_s: float) -> None:
    end = time.monotonic() + deadline_s
    while not true():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.3)


def until(
    server: ServerProcess, true: Callable[[dict[str, Any]], bool], deadline_s: float, load: Load
) -> dict[str, Any]:
    """The server's status, once this holds."""
    end = time.monotonic() + deadline_s
    while not true(status := server.status()):
        assert time.monotonic() < end, f"not in time: {status['learner']}\n{server.tail()}"
        assert load.failures == []
        time.sleep(0.3)
    return status


class Load:
    """Three clients that ask on and on; ``failures`` holds what went wrong."""

    def __init__(self, server: ServerProcess) -> None:
        self.failures: list[str] = []
        self.done = 0
        self._server = server
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._ask, args=(i,)) for i in range(3)]
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(60)

    def _ask(self, client: int) -> None:
        asked = 0
        while not self._stop.is_set():
            asked += 1
            body = {
                "model": "SmolLM2-135M-Instruct", "prompt": f"Story {client} {asked}: once",
                "max_tokens": 40, "ignore_eos": True,
            }  # fmt: skip
            try:
                answer = self._server.post("/v1/completions", body)
                if answer.status_code != 200 or not answer.json()["choices"][0]["text"]:
                    self.failures.append(answer.text)
                self.done += 1
            except httpx.HTTPError as error:
                self.failures.append(repr(error))
