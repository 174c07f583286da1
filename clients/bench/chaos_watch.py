"""What a server says of itself while something is broken on purpose: its states and its totals."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable
from typing import Any, Self

import httpx
import psutil

from clients.process import ServerProcess

INTERVAL = 0.25
"""Seconds between two looks."""

TOTAL = re.compile(r"^(paceline_\w+_total(?:\{[^}]*\})?) (\S+)$", re.MULTILINE)


class Watch:
    """``with Watch(server) as watch: ...``: looks at readiness and at every total of ours."""

    def __init__(self, server: ServerProcess) -> None:
        self.decreases: list[str] = []
        """Totals that went down: none may."""
        self.states: list[tuple[float, int, int]] = []
        """(when, status of /health, of /ready) whenever they changed; 0 where nothing answered."""
        self._server = server
        self._totals: dict[str, float] = {}
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(60)

    def figures(self) -> dict[str, Any]:
        return {
            "decreased_totals": self.decreases,
            "health": sorted({health for _, health, _ in self.states}),
            "ready": sorted({ready for _, _, ready in self.states}),
        }

    def _run(self) -> None:
        while not self._stop.wait(INTERVAL):
            state = self._status("/health"), self._status("/ready")
            if not self.states or self.states[-1][1:] != state:
                self.states.append((time.monotonic(), *state))
            try:
                text = self._server.get("/metrics").text
            except httpx.HTTPError:
                continue
            for name, value in totals(text).items():
                before = self._totals.get(name, 0.0)
                if value < before:
                    self.decreases.append(f"{name}: {before:g} -> {value:g}")
                self._totals[name] = value

    def _status(self, path: str) -> int:
        try:
            return self._server.get(path, timeout=10.0).status_code
        except httpx.HTTPError:
            return 0


def totals(text: str) -> dict[str, float]:
    """Every total of ours in a page of metrics."""
    return {name: float(value) for name, value in TOTAL.findall(text)}


def until(true: Callable[[], Any], what: str, deadline_s: float, interval_s: float = 0.2) -> float:
    """Seconds until it holds; raises TimeoutError that names it."""
    begun = time.monotonic()
    while True:
        try:
            if true():
                return time.monotonic() - begun
        except httpx.HTTPError:
            pass  # the server may be what is waited for
        if time.monotonic() - begun > deadline_s:
            raise TimeoutError(f"not within {deadline_s:.0f} s: {what}")
        time.sleep(interval_s)


def ready(server: ServerProcess) -> bool:
    return server.get("/ready").status_code == 200


def engine_of(server: ServerProcess) -> psutil.Process:
    """The process that runs the model (vLLM names it so)."""
    (engine,) = [p for p in server.children() if "EngineCore" in process_title(p)]
    return engine


def process_title(process: psutil.Process) -> str:
    try:
        return " ".join([process.name(), *process.cmdline()])
    except psutil.NoSuchProcess:
        return ""
