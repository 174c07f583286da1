"""The cores that the model computes on: only what there is, only by an admin, and over an engine's death."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient

from rlcore.records.engine_link import CaptureCounts, EngineReport
from server import deaths, routes
from server.access import Access, Gate
from server.model_cores import CoresError, EngineAway, ModelCores
from server.quotas import Quotas
from tests.server.test_keeper import World


class Engine:
    """A model on so many cores."""

    def __init__(self, cores: int) -> None:
        self.cores = cores
        self.told: list[int] = []
        self.fault: Exception | None = None

    async def compute_on(self, cores: int) -> int:
        if self.fault is not None:
            raise self.fault
        self.told.append(cores)
        self.cores = cores
        return cores


def test_within_what_there_is_the_engine_is_told_and_else_nobody():
    async def run() -> None:
        cores, engine = ModelCores(4, 2), Engine(2)
        with pytest.raises(EngineAway, match="not up yet"):
            await cores.allot(3)
        await cores.connect(engine.compute_on)
        assert engine.told == [], "it began with them"
        for wrong in (0, -1, 5):
            with pytest.raises(CoresError, match=f"1 to 4 cores, not on {wrong}"):
                await cores.allot(wrong)
        assert (engine.told, cores.allotted) == ([], 2)
        for right in (1, 4):
            assert await cores.allot(right) == right
            assert (engine.cores, cores.allotted, cores.all) == (right, right, right == 4)

    asyncio.run(run())


def test_what_the_engine_did_not_hear_is_not_said_to_be_so():
    async def run() -> None:
        cores, engine = ModelCores(4, 2), Engine(2)
        await cores.connect(engine.compute_on)
        engine.fault = RuntimeError("dead")
        with pytest.raises(EngineAway, match="could not be asked: dead"):
            await cores.allot(3)
        assert cores.allotted == 2

    asyncio.run(run())


def test_an_engine_that_is_started_again_is_told_anew(monkeypatch):
    monkeypatch.setattr(deaths, "SECOND_DELAY", 0.0)

    async def run() -> None:
        world, cores, engines = World(), ModelCores(4, 2), list[Engine]()

        async def install(_: Any) -> None:
            engines.append(Engine(2))
            await cores.connect(engines[-1].compute_on)

        world.keeper._install, world.keeper._remove = install, cores.disconnect
        task = asyncio.ensure_future(world.keeper.run())
        for wanted in (3, 1, 2):
            started = await world.until_ready()
            await cores.allot(wanted)
            started.errored = True
        await world.until_ready()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert [engine.told for engine in engines] == [[3], [3, 1], [1, 2], []]
        assert engines[-1].cores == cores.allotted == 2

    asyncio.run(run())


def an_app(cores: ModelCores, client: str = "127.0.0.1") -> TestClient:
    report = EngineReport("w", 0, 3, [], CaptureCounts(), threads=2)
    app = FastAPI()
    app.include_router(routes.router)
    app.state.paceline = SimpleNamespace(cores=cores, engine_link=SimpleNamespace(report=report))
    return TestClient(Access(app, Gate(), Quotas()), "http://localhost", client=(client, 5))


def test_the_route_answers_with_what_is_so_or_why_it_stays():
    cores, engine = ModelCores(4, 2), Engine(2)
    http = an_app(cores)
    assert http.post("/v1/paceline/cores", json={"cores": 3}).status_code == 503
    asyncio.run(cores.connect(engine.compute_on))
    answer = http.post("/v1/paceline/cores", json={"cores": 3})
    assert (answer.status_code, answer.json()) == (200, {"usable": 4, "allotted": 3, "threads": 3})
    answer = http.post("/v1/paceline/cores", json={"cores": 5})
    assert (answer.status_code, "1 to 4" in answer.json()["detail"]) == (409, True)
    for wrong in ({}, {"cores": "many"}, {"cores": 1.5}, {"cores": 1, "x": 1}):
        assert http.post("/v1/paceline/cores", json=wrong).status_code == 422
    assert engine.told == [3]


def test_threads_that_are_not_ours_stay():
    cores = ModelCores(0, 0)
    asyncio.run(cores.connect(Engine(2).compute_on))
    answer = an_app(cores).post("/v1/paceline/cores", json={"cores": 1})
    assert answer.status_code == 409
    assert "OMP_NUM_THREADS" in answer.json()["detail"]


def test_without_a_key_only_this_machine_moves_cores():
    cores = ModelCores(4, 2)
    assert (
        an_app(cores, "10.1.2.3").post("/v1/paceline/cores", json={"cores": 1}).status_code == 403
    )
