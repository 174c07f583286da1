"""Drives schemathesis over one route of a server after the other, and writes down every case."""

from __future__ import annotations

import argparse
import itertools
import random
import threading
import time
from collections.abc import Sequence
from typing import Any

import requests
import schemathesis
from schemathesis.engine import events, from_schema

from clients.bench.fuzz_cases import NONE, RIGHT, WRONG, Case, Tally, Target, judge, tracebacks

OTHER = "(other)"
"""Stands for a method that the path does not have."""

COUNTS = ("n", "best_of", "num_beams", "beam_width", "max_tool_calls")
"""Body fields that multiply the work of one request."""

HEADERS: tuple[dict[str, str], ...] = (
    {"x-paceline-usage": "true"},
    {},
    {"x-paceline-usage": "true", "x-paceline-policy-versions": "1", "x-paceline-tenant": "fuzz"},
    {},
    {"x-paceline-learn": "false"},
    {},
    {"x-paceline-learn": "perhaps"},
    {},
    {"x-paceline-usage": "TRUE"},
    {},
    {"x-paceline-tenant": "a b"},
    {},
    {"x-paceline-usage": "no", "x-paceline-learn": "1"},
    {},
    {"x-paceline-tenant": "x" * 65},
    {},
    {},
)
"""In turn; vLLM's OpenAPI does not know of them. As many as meet every key and every kind of body."""

PLAIN: dict[str, Any] = {
    "messages": [{"role": "user", "content": "Name a colour."}],
    "prompt": "Once upon a time",
    "input": "Name a colour.",
}
"""In the place of a drawn prompt, so that the other fields are reached."""

FEW = 4
"""Optional fields left in a thinned body: with all forty of them, one is always refused."""

KEYS = (RIGHT, RIGHT, NONE, RIGHT, RIGHT, WRONG, RIGHT, RIGHT)
"""In turn, where the server has a key."""

ENDLESS = "/feed"
"""A path that ends so streams until its client leaves."""

EVENTS = {True: 3, False: 200}
"""Read of a stream before the client leaves, by whether it is endless."""

KEPT = 2000
"""Characters of a request or an answer in a case."""

LOG_SETTLES_S = 0.3
"""Between an answer and its traceback in the log."""

LOG_READ = 1 << 20
"""Bytes of the log read for one case."""


def lower(body: Any, most: int) -> list[str]:
    """Lowers in place what would multiply the work of a request; says which fields."""
    capped = []
    if isinstance(body, dict):
        for name in COUNTS:
            value = body.get(name)
            if isinstance(value, int) and not isinstance(value, bool) and value > most:
                body[name] = most
                capped.append(name)
    return capped


def required_fields(api: dict[str, Any]) -> dict[str, list[str]]:
    """Of the JSON body of each path's POST, where its schema is an object of the components."""
    found = {}
    for path, item in api["paths"].items():
        content = item.get("post", {}).get("requestBody", {}).get("content", {})
        name = content.get("application/json", {}).get("schema", {}).get("$ref", "").split("/")[-1]
        found[path] = api.get("components", {}).get("schemas", {}).get(name, {}).get("required", [])
    return found


def thin(body: dict[str, Any], required: Sequence[str], draw: random.Random) -> None:
    """Leaves in place the required fields, the prompt, and a few others."""
    optional = sorted(set(body) - set(required) - set(PLAIN) - {"model"})
    for name in draw.sample(optional, max(0, len(optional) - FEW)):
        del body[name]


class Driver:
    """Sends what schemathesis draws; every case ends up in the tally, judged."""

    def __init__(
        self, target: Target, args: argparse.Namespace, tally: Tally, open_paths: Sequence[str]
    ) -> None:
        self._target = target
        self._args = args
        self._tally = tally
        self._open = open_paths
        self._required = required_fields(target.api)
        self._turn = itertools.count()
        self._lock = threading.Lock()
        self._begun: dict[str, tuple[float, int, str, list[str]]] = {}
        self.not_sent: list[str] = []
        """Why schemathesis could not test an operation, or part of it."""
        self._hook()

    def _hook(self) -> None:
        """Schemathesis takes plain functions only."""

        @schemathesis.hook
        def before_call(context: Any, case: Any, kwargs: dict[str, Any]) -> None:
            self._before(case)

        @schemathesis.hook
        def after_call(context: Any, case: Any, response: Any) -> None:
            self._note(case, response.request, response.status_code, response.content)

        @schemathesis.hook
        def after_network_error(context: Any, case: Any, request: requests.PreparedRequest) -> None:
            self._note(case, request, None, b"")

    def run(self, name: str, seconds: float) -> None:
        """Test one operation for at most so long, in all phases that test it alone."""
        args = self._args
        method, _, path = name.partition(" ")
        config = schemathesis.Config.from_dict(
            {
                "seed": args.seed,
                "base-url": self._target.url,
                "request-timeout": args.deadline,
                "max-stream-events": EVENTS[path.endswith(ENDLESS)],
                "continue-on-failure": True,
                "suppress-health-check": ["all"],
                "checks": {"enabled": False},
                "generation": {
                    "mode": "all",
                    "max-examples": args.examples,
                    "no-shrink": True,
                    "database": "none",
                },
                "phases": {"stateful": {"enabled": False}},
            }
        )
        schema = schemathesis.openapi.from_dict(self._target.api, config=config)
        stream = from_schema(schema.include(path=path, method=method)).execute()
        end = time.monotonic() + seconds
        timer = threading.Timer(seconds, stream.stop)
        timer.daemon = True
        timer.start()
        try:
            for event in stream:
                if isinstance(event, events.NonFatalError | events.FatalError):
                    self.not_sent.append(f"{name}: {event}"[:KEPT])
                if time.monotonic() > end + 2 * args.deadline:
                    raise TimeoutError(f"schemathesis does not stop testing {name}")
        finally:
            timer.cancel()

    def _before(self, case: Any) -> None:
        turn = next(self._turn)
        capped = lower(case.body, self._args.most)
        if isinstance(case.body, dict):
            self._make_plausible(case.body, case.operation, turn)
        kind = KEYS[turn % len(KEYS)] if self._target.key else RIGHT
        headers = dict(HEADERS[turn % len(HEADERS)])
        if kind == RIGHT and self._target.key:
            headers["authorization"] = f"Bearer {self._target.key}"
        elif kind == WRONG:
            headers["authorization"] = f"Bearer {self._target.model}"
        if headers:
            case.headers = {**(case.headers or {}), **headers}
        with self._lock:
            self._begun[case.id] = (time.monotonic(), self._log_size(), kind, capped)

    def _make_plausible(self, body: dict[str, Any], operation: Any, turn: int) -> None:
        """One body in four stays as it was drawn, one gets the model's name, two are thinned besides, and
        one of them gets a plain prompt."""
        kind = turn % 4
        if kind and "model" in body:
            body["model"] = self._target.model
        if kind in (1, 2):
            thin(body, self._required.get(operation.path, ()), random.Random(turn))
        if kind == 1:
            batch = operation.path.endswith("/batch")
            for name in set(PLAIN) & set(body):
                body[name] = [PLAIN[name]] if batch else PLAIN[name]

    def _note(
        self, case: Any, request: requests.PreparedRequest, status: int | None, content: bytes
    ) -> None:
        now = time.monotonic()
        with self._lock:
            begun, offset, kind, capped = self._begun.pop(case.id)
        method, path = case.method.upper(), case.operation.path
        known = method.lower() in self._target.api["paths"][path]
        noted = Case(
            route=f"{method if known else OTHER} {path}",
            key=kind,
            status=status,
            seconds=now - begun,
            capped=capped,
            request=_shown(request),
            response=content[:KEPT].decode(errors="replace"),
        )
        if status is None or status >= 500:
            noted.tracebacks = tracebacks(self._log_since(offset))
        noted.problem = judge(noted, self._args.deadline, self._open)
        with self._lock:
            self._tally.add(noted)

    def _log_size(self) -> int:
        log = self._target.log
        return log.stat().st_size if log is not None and log.exists() else 0

    def _log_since(self, offset: int) -> str:
        if self._target.log is None:
            return ""
        time.sleep(LOG_SETTLES_S)
        with open(self._target.log, "rb") as log:
            log.seek(offset)
            return log.read(LOG_READ).decode(errors="replace")


def _shown(request: requests.PreparedRequest) -> str:
    body = request.body or b""
    text = body.decode(errors="replace") if isinstance(body, bytes) else str(body)
    ours = {k: v for k, v in request.headers.items() if k.lower().startswith("x-paceline")}
    return f"{request.method} {request.url} {ours} {text}"[:KEPT]
