"""An engine that dies is started again, or the server ends; with engines that are none."""

from __future__ import annotations

import asyncio
import threading
from argparse import Namespace
from dataclasses import dataclass, field

import pytest

from server import deaths
from server import keeper as keeper_module
from server.front import Front
from server.keeper import EngineKeeper, ServeError
from server.overload import Places


@dataclass
class Engine:
    number: int
    errored: bool = False
    shut_down: bool = False
    calls_failed: bool = False

    def shutdown(self) -> None:
        self.shut_down = True

    def fail_calls(self) -> None:
        self.calls_failed = True


@dataclass
class World:
    """What starts engines; ``failing`` of the starts fail."""

    failing: set[int] = field(default_factory=set)
    started: list[Engine] = field(default_factory=list)
    removed: int = 0

    def __post_init__(self) -> None:
        self.front = Front(Places(1, 1), most_body=10, most_fields=10)
        self.attempts = 0
        self.keeper = EngineKeeper(
            self.front,
            self.arguments,
            self.start,
            self.install,
            self.remove,  # type: ignore[arg-type]
        )

    async def arguments(self) -> Namespace:
        return Namespace()

    def start(self, _: Namespace) -> Engine:
        self.attempts += 1
        if self.attempts in self.failing:
            raise RuntimeError("no memory\nleft")
        self.started.append(Engine(self.attempts))
        return self.started[-1]

    async def install(self, engine: Engine) -> None:
        assert not self.front.ready

    def remove(self) -> None:
        self.removed += 1

    async def until_ready(self) -> Engine:
        async with asyncio.timeout(5):
            while not self.front.ready:
                await asyncio.sleep(0.01)
        return self.started[-1]


@pytest.fixture(autouse=True)
def no_delays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deaths, "SECOND_DELAY", 0.0)


def test_a_dead_engine_is_replaced_and_nothing_of_it_stays():
    async def run() -> None:
        world = World()
        task = asyncio.ensure_future(world.keeper.run())
        first = await world.until_ready()
        assert (world.keeper.restarts, world.removed) == (0, 0)
        first.errored = True
        assert not world.front.ready  # at once
        assert world.front.live
        second = await world.until_ready()
        assert first.shut_down
        assert first.calls_failed
        assert (second.number, world.keeper.restarts, world.removed) == (2, 1, 1)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await world.keeper.stop()
        assert second.shut_down

    asyncio.run(run())


def test_a_first_start_that_fails_ends_the_server_with_one_line():
    world = World(failing={1})
    with pytest.raises(ServeError, match="did not start: no memory left"):
        asyncio.run(world.keeper.run())


def test_a_restart_that_fails_is_tried_again():
    async def run() -> None:
        world = World(failing={2, 3})
        task = asyncio.ensure_future(world.keeper.run())
        (await world.until_ready()).errored = True
        assert (await world.until_ready()).number == 4
        assert world.keeper.restarts == 3
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    asyncio.run(run())


def test_an_engine_that_dies_while_it_is_put_to_use_is_replaced():
    """What it was asked then is never answered, and nobody waits for that."""

    async def run() -> None:
        world = World()

        async def install(engine: Engine) -> None:
            if engine.number == 2:
                engine.errored = True
                await asyncio.Event().wait()

        world.keeper._install = install
        task = asyncio.ensure_future(world.keeper.run())
        (await world.until_ready()).errored = True
        assert (await world.until_ready()).number == 3
        assert world.started[1].shut_down
        assert world.removed == 2
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    asyncio.run(run())


def test_what_takes_too_long_is_named(monkeypatch: pytest.MonkeyPatch):
    async def times_out(engine: Engine) -> None:
        raise TimeoutError("a call to the engine took too long")

    async def never(engine: Engine) -> None:
        await asyncio.Event().wait()

    world = World()
    world.keeper._install = times_out
    with pytest.raises(ServeError, match="did not start: a call to the engine took too long"):
        asyncio.run(world.keeper.run())
    monkeypatch.setattr(keeper_module, "START_DEADLINE", 0.05)
    world.keeper._install = never
    with pytest.raises(ServeError, match="did not start within 0 s"):
        asyncio.run(world.keeper.run())


def test_an_engine_that_is_starting_is_ended_with_the_server(monkeypatch: pytest.MonkeyPatch):
    killed = threading.Event()
    monkeypatch.setattr(keeper_module, "kill_engine_processes", killed.set)

    async def run() -> None:
        world = World()

        def start(_: Namespace) -> Engine:
            assert killed.wait(5)
            raise RuntimeError("its process was killed")

        world.keeper._start_engine = start
        task = asyncio.ensure_future(world.keeper.run())
        await asyncio.sleep(0.1)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await asyncio.wait_for(world.keeper.stop(), 5)

    asyncio.run(run())


def test_an_engine_that_dies_again_and_again_is_given_up():
    async def run() -> None:
        world = World(failing=set(range(2, 100)))
        task = asyncio.ensure_future(world.keeper.run())
        (await world.until_ready()).errored = True
        with pytest.raises(ServeError, match=rf"died {deaths.MOST + 1} times within 10 minutes"):
            await task
        assert world.attempts == 1 + deaths.MOST

    asyncio.run(run())


def test_an_engine_that_dies_while_the_server_ends_is_not_replaced():
    async def run() -> None:
        world = World()
        task = asyncio.ensure_future(world.keeper.run())
        engine = await world.until_ready()
        world.front.change("draining")
        engine.errored = True
        await asyncio.wait_for(task, 5)
        assert world.attempts == 1

    asyncio.run(run())
