from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from rlcore.environments.host import EnvironmentHost
from rlcore.environments.worker_process import EnvironmentFailure
from rlcore.errors import UsageError

pytestmark = pytest.mark.slow

FAULTY = "tests.rlcore.environments.faulty"
DEADLINE_S = 3.0


def hosted(
    body: Callable[[EnvironmentHost], Awaitable[None]],
    name: str = "Faulty",
    workers: int = 1,
    **options: Any,
) -> None:
    async def run() -> None:
        async with EnvironmentHost(f"{FAULTY}:{name}", options, workers, DEADLINE_S) as host:
            await body(host)

    asyncio.run(run())


async def opened(host: EnvironmentHost, index: int = 0) -> int:
    number, messages = await host.reset(await host.task("train", index))
    assert messages[0].content == f"train {index}"
    return number


async def fails(host: EnvironmentHost, number: int, reply: str) -> str:
    with pytest.raises(EnvironmentFailure) as failure:
        await host.step(number, reply)
    with pytest.raises(UsageError, match="it has ended"):
        await host.score(number)
    return failure.value.reason


def alive(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_many_episodes_at_once_do_not_touch_each_other() -> None:
    async def body(host: EnvironmentHost) -> None:
        async def play(index: int) -> float:
            number = await opened(host, index)
            for turn in range(index):
                told = await host.step(number, "go on")
                assert told.messages[0].content == f"turn {turn + 1}"
            assert (await host.step(number, "end")).done
            return (await host.score(number)).reward

        rewards = await asyncio.gather(*(play(index) for index in range(10)))
        assert rewards == [index + 1 for index in range(10)]
        assert host.running == 0
        assert not host.failures

    hosted(body, workers=2)


@pytest.mark.parametrize(("reply", "reason"), [("hang", "deadline"), ("die", "died")])
def test_a_worker_that_hangs_or_dies_is_replaced_and_its_episode_fails(
    reply: str, reason: str
) -> None:
    async def body(host: EnvironmentHost) -> None:
        number = await opened(host)
        pid = int((await host.step(number, "pid")).messages[0].content)
        start = time.monotonic()
        assert await fails(host, number, reply) == reason
        assert time.monotonic() - start < DEADLINE_S + 5
        assert not alive(pid)
        number = await opened(host, 1)
        assert int((await host.step(number, "pid")).messages[0].content) != pid
        assert host.failures == {reason: 1}

    hosted(body)


def test_what_a_dead_worker_said_last_is_told() -> None:
    async def body(host: EnvironmentHost) -> None:
        number = await opened(host)
        with pytest.raises(EnvironmentFailure, match="the last words"):
            await host.step(number, "die")

    hosted(body)


def test_other_episodes_of_a_replaced_worker_are_lost_or_played_again() -> None:
    async def lost(host: EnvironmentHost) -> None:
        one, other = await opened(host, 0), await opened(host, 1)
        await host.step(other, "go on")
        await fails(host, one, "die")
        assert await fails(host, other, "go on") == "lost"
        assert host.failures == {"died": 1, "lost": 1}

    async def replayed(host: EnvironmentHost) -> None:
        one, other = await opened(host, 0), await opened(host, 1)
        await host.step(other, "go on")
        await fails(host, one, "die")
        told = await host.step(other, "go on")
        assert told.messages[0].content == "turn 2"
        assert (await host.score(other)).reward == 2
        assert host.failures == {"died": 1}

    hosted(lost)
    hosted(replayed, "Replayed")


@pytest.mark.parametrize("name", ["Faulty", "Unchecked"])
def test_a_reward_that_is_not_finite_is_a_failure(name: str) -> None:
    async def body(host: EnvironmentHost) -> None:
        number = await opened(host)
        await host.step(number, "nan")
        with pytest.raises(EnvironmentFailure, match=r"\(reward\)"):
            await host.score(number)
        assert host.failures == {"reward": 1}
        assert host.running == 0
        await host.step(await opened(host), "go on")  # the worker is as good as before

    hosted(body, name)


def test_faults_within_a_call_leave_the_worker_and_its_other_episodes_alone() -> None:
    async def body(host: EnvironmentHost) -> None:
        stays = await opened(host, 5)
        pid = (await host.step(stays, "pid")).messages[0].content
        assert await fails(host, await opened(host, 0), "raise") == "error"
        assert await fails(host, await opened(host, 1), "long") == "error"
        assert await fails(host, await opened(host, 2), "x" * (17 << 20)) == "size"
        noisy = await opened(host, 3)
        assert (await host.step(noisy, "print")).messages[0].content == "turn 1"
        assert (await host.step(noisy, "read")).messages[0].content == "''"
        assert (await host.step(noisy, "")).messages[0].content == "turn 3"
        assert (await host.step(stays, "pid")).messages[0].content == pid
        assert host.failures == {"error": 2, "size": 1}

    hosted(body)


def test_an_abandoned_episode_is_gone_and_not_counted() -> None:
    async def body(host: EnvironmentHost) -> None:
        number = await opened(host)
        await host.abandon(number)
        await host.abandon(number)
        assert host.running == 0
        with pytest.raises(UsageError, match="it has ended"):
            await host.step(number, "go on")
        assert not host.failures

    hosted(body)


def test_a_cancelled_call_is_not_answered_to_the_next() -> None:
    async def body(host: EnvironmentHost) -> None:
        number = await opened(host, 4)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(host.step(number, "hang"), 0.5)
        again = await opened(host, 5)
        assert (await host.step(again, "go on")).messages[0].content == "turn 1"

    hosted(body)


def test_bad_input_is_told_at_the_start() -> None:
    async def starts(spec: str, **options: Any) -> None:
        async with EnvironmentHost(spec, options, workers=2):
            pass

    with pytest.raises(UsageError, match="there is no environment"):
        asyncio.run(starts("nothing"))
    with pytest.raises(UsageError, match="option tasks: Expected `int`"):
        asyncio.run(starts(f"{FAULTY}:Faulty", tasks="many"))
    with pytest.raises(EnvironmentFailure, match="cannot be made"):
        asyncio.run(starts(f"{FAULTY}:Refusing"))

    async def body(host: EnvironmentHost) -> None:
        assert host.size("test") == 3
        for index in (-1, 3):
            with pytest.raises(UsageError, match="has 3 test tasks"):
                await host.task("test", index)

    hosted(body, tasks=3)


HEAVY = """
import sys
from rlcore.environments import registry, worker

registry.make("reasoning_gym:chain_sum", {})
registry.make("tools", {})
for path in registry.BUILT_IN.values():
    registry._load("spec", path)
import math_verify
print(*sys.modules.keys() & {"torch", "transformers", "vllm", "openai", "pydantic"})
"""


def test_workers_import_nothing_heavy() -> None:
    done = subprocess.run([sys.executable, "-c", HEAVY], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []


PARENT = """
import asyncio, sys
from rlcore.environments.host import EnvironmentHost

async def run():
    async with EnvironmentHost("tests.rlcore.environments.faulty:Faulty", {}, 2, 600.0) as host:
        numbers = [(await host.reset(await host.task("train", i)))[0] for i in range(2)]
        pids = [(await host.step(n, "pid")).messages[0].content for n in numbers]
        print(*pids, flush=True)
        await host.step(numbers[0], "hang")

asyncio.run(run())
"""


def test_workers_die_with_their_parent_even_in_a_call() -> None:
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT], stdout=subprocess.PIPE, cwd=Path.cwd(), env=os.environ
    )
    assert parent.stdout is not None
    pids = [int(word) for word in parent.stdout.readline().split()]
    assert len(pids) == 2
    assert all(alive(pid) for pid in pids)
    parent.kill()
    parent.wait(10)
    parent.stdout.close()
    deadline = time.monotonic() + 10
    while any(alive(pid) for pid in pids):
        assert time.monotonic() < deadline, "workers outlive their parent"
        time.sleep(0.05)
