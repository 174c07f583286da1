"""What is fuzzed, what became of each request, and whose fault that was. Pure: no I/O."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import msgspec

OURS_PATH = "/v1/paceline/"
PACKAGES = ("server", "rlcore", "learner")
"""Of this project: a frame in one of them is ours."""

AWAY = ("starting", "restarting", "draining", "failed")
"""Codes of the front's answers while there is no engine."""

RIGHT, NONE, WRONG = "right", "none", "wrong"
"""The key that a request carried."""

METHODS = ("get", "put", "post", "delete", "options", "head", "patch", "trace")

EXAMPLES = 3
"""Cases kept in full of each kind of failure."""

SLOWEST = 10

REFUSALS = 6
"""Reasons listed of each route."""

FRAME = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+), in (?P<name>.+)')
HANDED_ON = re.compile(r"await [\w.]+\(scope, ")
"""Our wrapping is in every traceback of a request; where it only hands on, the fault is not its."""


class Target(msgspec.Struct, frozen=True, kw_only=True):
    url: str
    key: str | None
    model: str
    api: dict[str, Any]
    """Its OpenAPI."""
    log: Path | None
    """Where its tracebacks go, if that is known."""


def with_bodies(api: dict[str, Any]) -> dict[str, Any]:
    """Adds the bodies that vLLM's routes take without telling so, where those routes are there."""
    told = json_body({"$ref": "#/components/schemas/CompletionRequest"})
    size = {"type": "integer", "minimum": 1, "maximum": 16}
    scale = {
        "type": "object",
        "properties": {"new_data_parallel_size": size},
        "required": ["new_data_parallel_size"],
    }
    bodies = {"/invocations": told, "/scale_elastic_ep": json_body(scale)}
    paths = dict(api["paths"])
    for path, body in bodies.items():
        if "post" in paths.get(path, {}):
            paths[path] = {**paths[path], "post": {"requestBody": body, **paths[path]["post"]}}
    return {**api, "paths": paths}


def json_body(schema: dict[str, Any]) -> dict[str, Any]:
    return {"required": True, "content": {"application/json": {"schema": schema}}}


def operations_of(
    api: dict[str, Any], only: Sequence[str] = (), without: Sequence[str] = ()
) -> list[str]:
    """Method and path of every operation that contains one of ``only`` and none of ``without``."""
    names = [
        f"{method.upper()} {path}"
        for path, item in api["paths"].items()
        for method in METHODS
        if method in item
    ]
    return [
        name
        for name in names
        if (not only or any(text in name for text in only))
        and not any(text in name for text in without)
    ]


class Frame(msgspec.Struct, frozen=True):
    file: str
    line: int
    name: str
    code: str

    @property
    def ours(self) -> bool:
        parts = self.file.split("/")
        installed = "site-packages" in parts or "dist-packages" in parts
        return not installed and any(package in parts for package in PACKAGES)

    @property
    def application(self) -> bool:
        """Ours or vLLM's; frameworks in between are nobody's fault."""
        if self.ours:
            return HANDED_ON.match(self.code) is None
        return "/site-packages/vllm/" in self.file

    def __str__(self) -> str:
        return f"{self.file}:{self.line} {self.name}"


class Case(msgspec.Struct, kw_only=True):
    """One request as it was sent, and what came back. ``status`` is None when nothing did."""

    route: str
    """Method and path template; ``(other)`` for a method that the path does not have."""
    key: str = RIGHT
    status: int | None = None
    seconds: float = 0.0
    capped: list[str] = []
    """Fields whose values were lowered before it was sent."""
    request: str = ""
    """The whole request line, our headers and the body, shortened."""
    response: str = ""
    tracebacks: list[list[Frame]] = []
    """That the server logged meanwhile; with more than one worker, another request's may be among them."""
    problem: str | None = None
    """``ours``, ``upstream``, ``unavailable`` (the engine is away), ``hang``, ``dropped`` or ``key`` (served
    without one); None when all is well."""


def tracebacks(log: str) -> list[list[Frame]]:
    """Every traceback in a piece of a server's log, outermost frame first."""
    found: list[list[Frame]] = []
    lines = log.splitlines()
    for i, line in enumerate(lines):
        if "Traceback (most recent call last)" in line:
            found.append([])
        match = FRAME.search(line)
        if match is not None and found:
            code = lines[i + 1] if i + 1 < len(lines) else ""
            code = re.sub(r"^\([^)]*\)", "", code).strip()  # vLLM names the process in each line
            name = match["name"].strip()
            found[-1].append(Frame(match["file"], int(match["line"]), name, code))
    return [frames for frames in found if frames]


def culprit(frames: Sequence[Frame]) -> Frame | None:
    """The innermost frame that is ours or vLLM's."""
    return next((frame for frame in reversed(frames) if frame.application), None)


def judge(case: Case, deadline_s: float, open_paths: Iterable[str] = ()) -> str | None:
    """What is wrong with a case; ``open_paths`` need no key.

    A 5xx is upstream's when its path is not ours, no traceback of its time points at our code, and the
    answer does not carry the words of our wrapping (which has a ``code`` in letters; vLLM's are numbers).
    """
    if case.status is None:
        return "hang" if case.seconds >= deadline_s else "dropped"
    if case.seconds > deadline_s:
        return "hang"
    if case.key != RIGHT and case.status != 401 and not opened(case.route, open_paths):
        return "key"
    if case.status < 500:
        return None
    code = code_of(case.response)
    if code in AWAY:
        return "unavailable"
    if OURS_PATH in case.route or isinstance(code, str):
        return "ours"
    blamed = [culprit(frames) for frames in case.tracebacks]
    return "ours" if any(frame is not None and frame.ours for frame in blamed) else "upstream"


def opened(route: str, open_paths: Iterable[str]) -> bool:
    return any(route.endswith(f" {path}") for path in open_paths)


def code_of(response: str) -> object:
    """Of an error as OpenAI's clients read it; None for anything else."""
    try:
        error = msgspec.json.decode(response).get("error")
    except (msgspec.DecodeError, AttributeError):
        return None
    return error.get("code") if isinstance(error, dict) else None


def signature(case: Case) -> tuple[str, str, int | None, str]:
    """Cases with one signature are one failure."""
    blamed = [str(frame) for frames in case.tracebacks if (frame := culprit(frames)) is not None]
    words = blamed[-1] if blamed else words_of(case.response)
    return (case.problem or "", case.route, case.status, words)


def words_of(response: str) -> str:
    """The beginning of an error, without what differs from case to case."""
    try:
        words = msgspec.json.decode(response)["error"]["message"]
    except (msgspec.DecodeError, LookupError, TypeError):
        words = response
    return re.sub(r"[\d.]+|'[^']*'", "*", str(words))[:120]


class Tally:
    """All cases of a run: counts by route, failures by kind with a few in full, the slowest."""

    def __init__(self) -> None:
        self.cases = 0
        self.statuses: dict[str, Counter[str]] = {}
        self.keys: Counter[str] = Counter()
        self.capped: Counter[str] = Counter()
        self.slowest: list[tuple[float, str, int | None]] = []
        self._failures: dict[tuple[str, str, int | None, str], list[Case]] = {}
        self._counts: Counter[tuple[str, str, int | None, str]] = Counter()
        self._slowest_of: dict[str, float] = {}
        self._refusals: dict[str, Counter[str]] = {}

    def add(self, case: Case) -> None:
        self.cases += 1
        status = "no answer" if case.status is None else str(case.status)
        self.statuses.setdefault(case.route, Counter())[status] += 1
        self.keys[case.key] += 1
        self.capped.update(case.capped)
        self._slowest_of[case.route] = max(case.seconds, self._slowest_of.get(case.route, 0.0))
        self.slowest = sorted(
            [*self.slowest, (case.seconds, case.route, case.status)], key=lambda s: -s[0]
        )[:SLOWEST]
        if case.status in (400, 422):
            self._refusals.setdefault(case.route, Counter())[words_of(case.response)] += 1
        if case.problem is not None:
            kind = signature(case)
            self._counts[kind] += 1
            kept = self._failures.setdefault(kind, [])
            if len(kept) < EXAMPLES:
                kept.append(case)

    def problems(self) -> Counter[str]:
        """Cases by what was wrong with them."""
        total: Counter[str] = Counter()
        for kind, count in self._counts.items():
            total[kind[0]] += count
        return total

    def failures(self) -> list[dict[str, Any]]:
        """Each kind of failure, commonest first, with a few of its cases."""
        return [
            {
                "problem": problem,
                "route": route,
                "status": status,
                "where": where,
                "count": count,
                "cases": [
                    {**msgspec.to_builtins(case), "tracebacks": _ends(case)}
                    for case in self._failures[(problem, route, status, where)]
                ],
            }
            for (problem, route, status, where), count in self._counts.most_common()
        ]

    def routes(self) -> dict[str, dict[str, Any]]:
        return {
            route: {
                "cases": counts.total(),
                "statuses": dict(sorted(counts.items())),
                "slowest_s": self._slowest_of[route],
                "refusals": dict(self._refusals.get(route, Counter()).most_common(REFUSALS)),
            }
            for route, counts in sorted(self.statuses.items())
        }


def _ends(case: Case) -> list[list[str]]:
    """The innermost frames of each traceback."""
    return [[str(frame) for frame in frames[-4:]] for frames in case.tracebacks[-3:]]
