"""The engine of a run over its losses: what it was told last holds for the one that comes back."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from rlcore.generator.base import GeneratorError, GeneratorStatus, Published
from rlcore.rl.engine import Engine, Live


class Sampler:
    """A generator that can be lost."""

    def __init__(self) -> None:
        self.version, self.told, self.gone = 0, list[str](), False

    def _check(self) -> None:
        if self.gone:
            raise GeneratorError("it is gone", gone=True)

    async def publish(self, version: int, folder: Path, sha256: str) -> Published:
        self._check()
        self.version = version
        self.told.append(f"version {version}")
        return Published(version, 0.0, 0)

    async def compute_on(self, cores: int) -> None:
        self._check()
        if cores > 4:
            raise GeneratorError(f"not on {cores}")
        self.told.append(f"{cores} cores")

    async def status(self) -> GeneratorStatus:
        self._check()
        return GeneratorStatus(self.version, 0)

    async def longest(self) -> int:
        return 100


class AnyPlace:
    """Gives one sampler after the other."""

    def __init__(self) -> None:
        self.given: list[Sampler] = []

    async def start(self) -> Any:
        self.given.append(Sampler())
        return self.given[-1]

    async def lost(self) -> bool:
        return self.given[-1].gone

    async def start_again(self) -> Any:
        return await self.start()

    async def stop(self) -> None: ...


async def started() -> tuple[Engine, AnyPlace]:
    place = AnyPlace()
    engine = Engine(place)
    await engine.start()
    return engine, place


def test_an_engine_that_is_brought_back_computes_on_the_cores_of_the_one_before():
    async def run() -> None:
        engine, place = await started()
        await engine.publish(Live(3, Path("p"), "0"))
        await engine.compute_on(2)
        await engine.compute_on(1)
        place.given[0].gone = True
        assert (await engine.status()).policy_version == 3
        assert place.given[1].told == ["version 3", "1 cores"]
        assert engine.restarts == 1

    asyncio.run(run())


def test_one_whose_cores_were_never_moved_is_not_told_of_any():
    async def run() -> None:
        engine, place = await started()
        place.given[0].gone = True
        await engine.status()
        assert place.given[1].told == []

    asyncio.run(run())


def test_an_engine_that_is_lost_while_it_is_told_is_told_when_it_is_back():
    async def run() -> None:
        engine, place = await started()
        place.given[0].gone = True
        await engine.compute_on(3)
        assert place.given[1].told == ["3 cores"]

    asyncio.run(run())


def test_a_refusal_is_raised_and_what_was_told_before_holds():
    async def run() -> None:
        engine, place = await started()
        await engine.compute_on(2)
        with pytest.raises(GeneratorError, match="not on 9"):
            await engine.compute_on(9)
        place.given[0].gone = True
        await engine.status()
        assert place.given[1].told == ["2 cores"]

    asyncio.run(run())
