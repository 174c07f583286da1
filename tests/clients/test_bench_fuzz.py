"""The fuzz benchmark: whose fault an answer is, what is sent, and a whole run against a small server."""

from __future__ import annotations

import random
import time
from typing import Any

import pytest
from fastapi import FastAPI, Header, HTTPException, Response
from pydantic import BaseModel

from clients.bench import fuzz
from clients.bench.fuzz_cases import (
    Case,
    Frame,
    Tally,
    judge,
    operations_of,
    tracebacks,
    with_bodies,
)
from clients.bench.fuzz_drive import FEW, lower, thin
from tests.clients.stub import running

VLLM = "/x/site-packages/vllm/entrypoints/serving.py"
LOG = """\
INFO nothing to see
(APIServer pid=7) ERROR: Exception in ASGI application
(APIServer pid=7) Traceback (most recent call last):
(APIServer pid=7)   File "/y/server/middleware.py", line 90, in __call__
(APIServer pid=7)     await self.app(scope, receive, send_on)
(APIServer pid=7)   File "{inner}", line 12, in work
(APIServer pid=7)     do()
(APIServer pid=7)   File "/x/site-packages/pydantic/main.py", line 5, in validate
(APIServer pid=7)     raise ValueError
(APIServer pid=7) ValueError: no
"""


def case(status: int | None = 500, **changes: Any) -> Case:
    return Case(**{"route": "POST /v1/completions", "status": status, "seconds": 1.0, **changes})


def test_a_5xx_is_of_the_innermost_code_that_is_ours_or_vllms() -> None:
    for inner, problem in ((VLLM, "upstream"), ("/y/rlcore/engine/frontend.py", "ours")):
        (frames,) = tracebacks(LOG.format(inner=inner))
        assert [frame.line for frame in frames] == [90, 12, 5]
        assert judge(case(tracebacks=[frames]), 10.0) == problem


def test_where_ours_calls_vllms_the_inner_one_is_blamed_and_the_other_way_round() -> None:
    mine = Frame("/y/rlcore/engine/frontend.py", 3, "generate", "super().generate()")
    theirs = Frame(VLLM, 4, "work", "do()")
    assert judge(case(tracebacks=[[mine, theirs]]), 10.0) == "upstream"
    assert judge(case(tracebacks=[[theirs, mine]]), 10.0) == "ours"


def test_a_5xx_that_our_wrapping_passes_on_is_not_ours() -> None:
    (frames,) = tracebacks(LOG.format(inner="/x/site-packages/starlette/routing.py"))
    assert judge(case(tracebacks=[frames]), 10.0) == "upstream"


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"route": "GET /v1/paceline/status"}, "ours"),
        ({"response": '{"error": {"code": "restarting"}}', "status": 503}, "unavailable"),
        ({"response": '{"error": {"code": "engine_gone"}}'}, "ours"),
        ({"response": '{"error": {"code": 500}}'}, "upstream"),
        ({"status": 404}, None),
        ({"status": 200, "seconds": 11.0}, "hang"),
        ({"status": None, "seconds": 11.0}, "hang"),
        ({"status": None}, "dropped"),
        ({"status": 200, "key": "wrong"}, "key"),
        ({"status": 401, "key": "wrong"}, None),
        ({"status": 401}, None),
        ({"status": 200, "key": "none", "route": "GET /health"}, None),
        ({"status": 200, "key": "none", "route": "GET /v1/health"}, "key"),
    ],
)
def test_what_is_wrong_with_a_case(changes: dict[str, Any], problem: str | None) -> None:
    assert judge(case(**changes), 10.0, open_paths=("/health",)) == problem


def test_a_tally_counts_each_kind_of_failure_once_and_keeps_few_of_its_cases() -> None:
    tally = Tally()
    for i in range(5):
        tally.add(case(problem="upstream", response=f"error {i}", seconds=float(i)))
    tally.add(case(status=200))
    (failure,) = tally.failures()
    assert (failure["count"], len(failure["cases"])) == (5, 3)
    assert tally.routes()["POST /v1/completions"]["statuses"] == {"200": 1, "500": 5}
    assert tally.slowest[0][0] == 4.0


def test_only_what_multiplies_work_is_lowered() -> None:
    body = {"n": 10**9, "best_of": 3, "max_tokens": 10**6, "n_is": "x"}
    assert lower(body, 8) == ["n"]
    assert body == {"n": 8, "best_of": 3, "max_tokens": 10**6, "n_is": "x"}
    assert lower([1], 8) == lower({"n": "many"}, 8) == lower({"n": True}, 8) == []


def test_a_thinned_body_keeps_what_is_required_and_the_prompt() -> None:
    body = {"model": "m", "prompt": "p", "must": 1, **{f"may{i}": i for i in range(20)}}
    thin(body, ["must"], random.Random(0))
    assert {"model", "prompt", "must"} < set(body)
    assert len(body) == 3 + FEW
    few = {"must": 1, "may": 2}
    thin(few, ["must"], random.Random(0))
    assert few == {"must": 1, "may": 2}


def test_refusals_are_counted_by_their_words() -> None:
    tally = Tally()
    for i in range(3):
        tally.add(case(status=400, response=f'{{"error": {{"message": "n is {i}"}}}}'))
    assert tally.routes()["POST /v1/completions"]["refusals"] == {"n is *": 3}


def test_operations_are_chosen_by_what_they_contain() -> None:
    api = {"paths": {"/a": {"get": {}, "post": {}}, "/b": {"get": {}, "summary": "x"}}}
    assert operations_of(api) == ["GET /a", "POST /a", "GET /b"]
    assert operations_of(api, only=["/a"], without=["POST"]) == ["GET /a"]


def test_routes_that_hide_their_body_get_one_and_others_stay() -> None:
    api = {"paths": {"/invocations": {"post": {"summary": "x"}}, "/a": {"post": {}}}}
    found = with_bodies(api)["paths"]
    assert found["/invocations"]["post"]["requestBody"]["required"]
    assert found["/a"] == {"post": {}}
    assert "/scale_elastic_ep" not in found


class Order(BaseModel):
    model: str
    n: int = 1


class Small:
    """A server with a key, a route that fails for what is plausible, and one that is slow."""

    def __init__(self) -> None:
        self.app = FastAPI()
        self.app.get("/v1/models")(self.models)
        self.app.post("/v1/completions")(self.complete)
        self.app.get("/v1/paceline/slow")(self.slow)
        self.app.get("/v1/paceline/open")(self.unguarded)
        self.seen: list[tuple[str, int]] = []
        self.url = ""

    def check(self, authorization: str | None) -> None:
        if authorization != "Bearer k":
            raise HTTPException(401)

    async def models(self, authorization: str | None = Header(None)) -> dict[str, Any]:
        self.check(authorization)
        return {"data": [{"id": "small"}]}

    async def complete(self, order: Order, authorization: str | None = Header(None)) -> Response:
        self.check(authorization)
        self.seen.append((order.model, order.n))
        return Response(status_code=500 if order.model == "small" else 200)

    def slow(self, authorization: str | None = Header(None)) -> None:
        self.check(authorization)
        time.sleep(1.5)

    async def unguarded(self) -> None:
        return None


@pytest.mark.slow
def test_a_run_finds_the_5xx_the_hang_and_the_route_without_a_key() -> None:
    with running(Small()) as small:
        url = small.url.removesuffix("/v1")
        args = fuzz.parse(
            [
                "--url", url, "--api-key", "k", "--examples", "6", "--minutes", "5",
                "--deadline", "1", "--seed", "3",
            ]
        )  # fmt: skip
        report = fuzz.fuzz(args)
    found = {(f["problem"], f["route"]) for f in report["failures"]}
    assert ("upstream", "POST /v1/completions") in found
    assert ("hang", "GET /v1/paceline/slow") in found
    assert ("key", "GET /v1/paceline/open") in found
    assert report["cases"] == sum(route["cases"] for route in report["routes"].values())
    assert max(n for _, n in small.seen) <= args.most
    assert any(model == "small" for model, _ in small.seen)
    assert report["keys"]["right"] > report["keys"]["wrong"] > 0
