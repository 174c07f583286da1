"""Stands where a learner would: takes a server's traces, counts them, and throws them away.

``python -m clients.bench.drain ENDPOINT`` binds the trace socket and, on SIGTERM, prints its counts
as JSON. With it the cost of capturing and sending is measured without that of learning beside it.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import TracebackType
from typing import Self

import zmq

STOP_S = 10.0
POLL_MS = 200


class DrainProcess:
    """A drain as a child process; ``counts`` are known after ``stop``."""

    def __init__(self, folder: Path) -> None:
        self.base = f"ipc://{folder}/drain"
        """What ``paceline serve --learner`` is given: a server adds ``.traces`` to it."""
        self.counts: dict[str, int] = {"messages": 0, "bytes": 0}
        self._socket = folder / "drain.traces"
        self._process: subprocess.Popen[str] | None = None

    def __enter__(self) -> Self:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "clients.bench.drain", f"ipc://{self._socket}"],
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        deadline = time.monotonic() + STOP_S
        while not self._socket.exists():
            if self._process.poll() is not None or time.monotonic() > deadline:
                self.stop()
                raise RuntimeError(f"the drain did not bind {self._socket}")
            time.sleep(0.05)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()

    def stop(self) -> None:
        process = self._process
        if process is None:
            return
        self._process = None
        process.terminate()
        try:
            out, _ = process.communicate(timeout=STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()
            return
        if out.strip():
            self.counts = json.loads(out)


def main(endpoint: str) -> None:
    os.nice(10)  # as a learner: serving comes first
    stopping = False

    def stop(signum: int, frame: object) -> None:
        nonlocal stopping
        stopping = True

    signal.signal(signal.SIGTERM, stop)
    counts = {"messages": 0, "bytes": 0}
    with zmq.Context() as context, context.socket(zmq.PULL) as socket:
        socket.setsockopt(zmq.LINGER, 0)
        socket.bind(endpoint)
        while not stopping:
            if not socket.poll(POLL_MS):
                continue
            frames = socket.recv_multipart(copy=False)
            counts["messages"] += 1
            counts["bytes"] += sum(len(frame) for frame in frames)
    print(json.dumps(counts), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
