"""The locustfile of the overload benchmark: users that ask for a stream each, at a fixed pace.

Runs in locust's own process, which patches the standard library; the benchmark reads the lines of JSON it
writes. What to do stands in the environment variable PACELINE_OVERLOAD.
"""

from __future__ import annotations

import json
import os
import random
import time
from typing import Any

import requests
from locust import HttpUser, task
from locust.exception import StopUser

SETTINGS = json.loads(os.environ["PACELINE_OVERLOAD"])
RANDOM = random.Random(SETTINGS["seed"])
OUT = open(SETTINGS["out"], "a", buffering=1)  # noqa: SIM115 (open as long as the process lives)

WORDS = [
    "river", "stone", "lantern", "market", "winter", "engine", "garden", "letter", "bridge", "copper",
    "island", "thunder", "window", "silver", "forest", "harbour", "kitchen", "mountain", "paper",
]  # fmt: skip


def prompt() -> str:
    """New every time, so that nothing of it is in the prefix cache."""
    return f"Write a story with these words: {' '.join(RANDOM.choices(WORDS, k=12))}."


class Asker(HttpUser):
    """Asks once every ``pace`` seconds, and does not come back sooner when it is refused.

    The load ends so many seconds after its first request; the last user to leave ends locust, whose own
    clock starts before it is ready.
    """

    asking = 0
    end = 0.0

    def on_start(self) -> None:
        Asker.asking += 1
        # Users are not in step. Locust has made this sleep gevent's.
        time.sleep(RANDOM.random() * SETTINGS["pace"])
        self._due = time.monotonic()

    def wait_time(self) -> float:
        """Until its next turn. Locust's ``constant_pacing`` would bring all users into step."""
        self._due += SETTINGS["pace"]
        return max(0.0, self._due - time.monotonic())

    @task
    def ask(self) -> None:
        if not Asker.end:
            Asker.end = time.time() + SETTINGS["seconds"]
        if time.time() >= Asker.end:
            Asker.asking -= 1
            if Asker.asking == 0:
                self.environment.runner.quit()
            raise StopUser
        body = {
            "model": SETTINGS["model"],
            "messages": [{"role": "user", "content": prompt()}],
            "max_tokens": SETTINGS["max_tokens"],
            "temperature": 0.0,
            "ignore_eos": True,
            "stream": True,
        }
        event: dict[str, Any] = {
            "started": time.time(),
            "first": None,
            "status": 0,
            "complete": False,
        }
        # Its own connection: a kept one may be closed by the server just as it is used again.
        with self.client.post(
            "/v1/chat/completions", json=body, stream=True, timeout=SETTINGS["deadline"],
            catch_response=True, headers={"connection": "close"},
        ) as response:  # fmt: skip
            event["status"] = response.status_code
            try:
                if response.status_code == 200:
                    self._read(response, event)
                else:
                    event["retry_after"] = (response.headers or {}).get("retry-after")
                    event["body"] = (response.text or str(response.error))[:500]
            except requests.RequestException as error:
                event["body"] = str(error)[:500]
            if event["complete"] or response.status_code == 429:
                response.success()
            else:
                response.failure(f"status {response.status_code}, not complete")
        event["ended"] = time.time()
        OUT.write(json.dumps(event) + "\n")

    def _read(self, response: Any, event: dict[str, Any]) -> None:
        for line in response.iter_lines():
            if line == b"data: [DONE]":
                event["complete"] = True
            elif event["first"] is None and b'"content":"' in line and b'"content":""' not in line:
                event["first"] = time.time()
