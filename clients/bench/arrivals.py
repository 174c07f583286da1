"""One block's requests to one server: so many at a time, or at times of their own (Poisson, bursts)."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence

import msgspec
import numpy as np
from openai import AsyncOpenAI

from clients.load import LoadOptions, RequestRecord, run_load, send
from clients.workload import Prompt


def arrival_times(count: int, rate: float, seed: int, block: int) -> list[float]:
    """Seconds after the block's begin; a block has the same times on every server."""
    waits = np.random.default_rng([seed, block]).exponential(1 / rate, count)
    waits[0] = 0.0
    return [float(t) for t in np.cumsum(waits)]


class Burst(msgspec.Struct, frozen=True):
    """``count`` requests at once, again and again."""

    count: int
    every_s: float


def with_bursts(times: Sequence[float], burst: Burst) -> list[float]:
    """The same number of arrivals: those given, bursts among them, as far as they then reach.

    The first burst comes ``every_s`` after the begin.
    """
    bursts = int(times[-1] / burst.every_s)
    added = [burst.every_s * (i + 1) for i in range(bursts) for _ in range(burst.count)]
    return sorted([*times, *added])[: len(times)]


async def send_block(
    client: AsyncOpenAI,
    prompts: Sequence[Prompt],
    options: LoadOptions,
    *,
    origin: float,
    arrivals: Sequence[float] | None,
    on_record: Callable[[RequestRecord], None],
) -> list[RequestRecord]:
    """All records, as they ended. Without arrivals ``options.concurrency`` are under way at a time.

    ``origin`` is the ``time.perf_counter()`` that all times count from.
    """
    if arrivals is None:
        result = await run_load(client, prompts, options, origin=origin, on_record=on_record)
        return result.records
    begin = time.perf_counter()
    records: list[RequestRecord] = []

    async def one(number: int, prompt: Prompt, at: float) -> None:
        await asyncio.sleep(begin + at - time.perf_counter())
        record = await send(client, prompt, options, origin=origin, number=number)
        records.append(record)
        on_record(record)

    async with asyncio.TaskGroup() as group:
        for number, (prompt, at) in enumerate(zip(prompts, arrivals, strict=True)):
            group.create_task(one(number, prompt, at))
    return records
