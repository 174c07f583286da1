"""Requests that go on while something is broken on purpose, and what became of each.

A request is ``served``; ``cut`` when the engine died under it and it was told so; ``turned away`` when there
was no engine and it was told when to come back; anything else is ``lost``.
"""

from __future__ import annotations

import json
import threading
import time
from collections import Counter
from dataclasses import dataclass
from typing import Any, Literal, Self

import httpx

from clients.process import ServerProcess

Outcome = Literal["served", "cut", "turned away", "lost"]

PAUSE = 0.2
"""Seconds a client waits after it was turned away: less than it is told, so that there are many of them."""

DEADLINE = 180.0
"""Seconds after which a request without an end is lost."""


@dataclass(frozen=True)
class Sent:
    """One request. Times are of ``time.monotonic``."""

    started: float
    ended: float
    outcome: Outcome
    stream: bool
    why: str
    """Its status and the words of its error; empty when it was served."""
    draft_version: str | None
    """Of the response's headers."""

    @property
    def seconds(self) -> float:
        return self.ended - self.started


class Load:
    """``with Load(server, 4) as load: ...``: so many clients, every other one streams."""

    def __init__(self, server: ServerProcess, clients: int, max_tokens: int = 48) -> None:
        self.sent: list[Sent] = []
        self._server = server
        self._max_tokens = max_tokens
        self._stop = threading.Event()
        self._threads = [
            threading.Thread(target=self._ask, args=(i,), daemon=True) for i in range(clients)
        ]

    def __enter__(self) -> Self:
        self._model = self._server.get("/v1/models").json()["data"][0]["id"]
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(DEADLINE)

    def figures(self, since: float = 0.0) -> dict[str, Any]:
        """Of the requests that started after a moment: counts, and the words of all that failed."""
        sent = [one for one in self.sent if one.started >= since]
        outcomes = Counter(one.outcome for one in sent)
        seconds = sorted(one.seconds for one in sent if one.outcome == "served")
        return {
            "requests": len(sent),
            **{name.replace(" ", "_"): outcomes[name] for name in ("served", "cut", "turned away", "lost")},
            "why": dict(Counter(one.why for one in sent if one.why).most_common(10)),
            "median_s": round(seconds[len(seconds) // 2], 2) if seconds else None,
            "longest_s": round(seconds[-1], 2) if seconds else None,
        }  # fmt: skip

    def wait_for_served(self, count: int, deadline_s: float) -> None:
        """Until so many more requests were served; raises TimeoutError."""
        end = time.monotonic() + deadline_s
        wanted = self._served + count
        while self._served < wanted:
            if time.monotonic() > end:
                raise TimeoutError(f"{count} requests were not served within {deadline_s:.0f} s")
            time.sleep(0.1)

    @property
    def _served(self) -> int:
        return sum(one.outcome == "served" for one in self.sent)

    def _ask(self, number: int) -> None:
        asked = 0
        with httpx.Client(base_url=self._server.url, timeout=DEADLINE, trust_env=False) as client:
            while not self._stop.is_set():
                asked += 1
                body = {
                    "model": self._model,
                    "prompt": f"Story {number}.{asked}: once upon a time",
                    "max_tokens": self._max_tokens,
                    "ignore_eos": True,
                    "stream": number % 2 == 1,
                }
                one = ask(client, body)
                self.sent.append(one)
                if one.outcome != "served":
                    self._stop.wait(PAUSE)


def ask(client: httpx.Client, body: dict[str, Any]) -> Sent:
    """Send one completion and see what becomes of it."""
    started = time.monotonic()
    version = None
    try:
        with client.stream("POST", "/v1/completions", json=body) as response:
            version = response.headers.get("x-paceline-draft-version")
            text = response.read().decode()
        outcome, why = _judge(response, text, body["stream"])
    except httpx.HTTPError as error:
        outcome, why = "lost", type(error).__name__
    return Sent(started, time.monotonic(), outcome, body["stream"], why, version)


def _judge(response: httpx.Response, text: str, stream: bool) -> tuple[Outcome, str]:
    if response.status_code == 200 and not stream:
        return ("served", "") if response.json()["choices"][0]["text"] else ("lost", "200: empty")
    if response.status_code == 200:
        events = [line[6:] for line in text.splitlines() if line.startswith("data: ")]
        errors = [json.loads(e)["error"] for e in events if e.startswith('{"error"')]
        if errors:
            died = errors[0].get("code") == 503
            return "cut" if died else "lost", f"stream: {errors[0].get('message')}"
        whole = events[-1:] == ["[DONE]"] and len(events) > 1
        return ("served", "") if whole else ("lost", "a stream without an end")
    why = f"{response.status_code}: {_message(text)}"
    if response.status_code != 503 or "retry-after" not in response.headers:
        return "lost", why
    return ("cut" if "died while it served" in why else "turned away"), why


def _message(text: str) -> str:
    try:
        return str(json.loads(text)["error"]["message"])
    except (ValueError, LookupError, TypeError):
        return text[:200]
