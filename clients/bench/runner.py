"""Carries out a plan: every block on its modes' servers, one after the other.

All servers are up for the whole run; an idle one uses next to no processor time, and what it uses
stands in the samples. The online server's learner is stopped (SIGSTOP) while another mode is measured:
a server without a learner has none beside it, and the learner gets the time that its own server's
traffic takes, as it would without a benchmark.
"""

from __future__ import annotations

import argparse
import asyncio
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress

import httpx
import msgspec
import psutil

from clients.bench.arrivals import arrival_times, send_block, with_bursts
from clients.bench.common import BenchError
from clients.bench.plain_vllm import SpeculationCounter
from clients.bench.plan import ONLINE, OURS, Block
from clients.bench.samples import Reading, Sample, make_sample, read_status
from clients.load import LoadOptions, RequestRecord, make_client, served_model
from clients.process import ServerFailed, ServerProcess
from clients.summary import acceptance

SETTLE_S = 0.3
"""Between two measurements: background threads come to rest, counters are written."""

WARM_UP = ("Say hello.", "Count from one to ten.")
"""Sent to every server first and not learned from; the first steps of an engine are slow."""


SEEDS_A_BLOCK = 10_000
"""Sampled requests have seeds of their own, the same on every server."""


class BlockRecords(msgspec.Struct):
    """The requests of one sample, as their clients saw them."""

    block: int
    mode: str
    records: list[RequestRecord]


class Runner:
    """``samples``, ``records`` and ``readings`` grow as blocks are run."""

    def __init__(
        self,
        args: argparse.Namespace,
        servers: Mapping[str, ServerProcess],
        on_sample: Callable[[Sample], None],
    ) -> None:
        self._args = args
        self._servers = servers
        self._on_sample = on_sample
        self._origin = time.perf_counter()
        self._lead = ONLINE if ONLINE in servers else list(servers)[-1]
        self._lead_tokens = self._lead_requests = 0
        self.samples: list[Sample] = []
        self.records: list[BlockRecords] = []
        self.readings: list[Reading] = []

    def run(self, blocks: Sequence[Block]) -> None:
        """Raises BenchError when a server no longer serves."""
        for server in self._servers.values():
            asyncio.run(warm_up(server))
        self._origin = time.perf_counter()
        for block in blocks:
            for mode in block.modes:
                with self._learner_as_wanted(mode, block.measured):
                    self._run_one(block, mode)

    @contextmanager
    def _learner_as_wanted(self, mode: str, measured: bool) -> Iterator[None]:
        """Stop the learner for as long as it is not to run beside this measurement."""
        online = self._servers.get(ONLINE)
        runs = mode == ONLINE or self._args.learner_always
        if online is None or (runs and not (measured and self._args.quiet_measure)):
            yield
            return
        learner = online.learner()
        if learner is None:
            yield
            return
        with suppress(psutil.NoSuchProcess):
            learner.send_signal(signal.SIGSTOP)
        try:
            yield
        finally:
            with suppress(psutil.NoSuchProcess):
                learner.send_signal(signal.SIGCONT)

    def _run_one(self, block: Block, mode: str) -> None:
        server = self._servers[mode]
        others = [other for name, other in self._servers.items() if name != mode]
        time.sleep(SETTLE_S)
        before = None if mode in OURS else SpeculationCounter.read(server.get("/metrics").text)
        idle, begun = _cpu_seconds(others), time.monotonic()
        records = asyncio.run(self._load(block, mode, server))
        share = (_cpu_seconds(others) - idle) / (time.monotonic() - begun)
        _check(mode, server, records)
        if before is None:
            count = acceptance(records)
        else:
            time.sleep(SETTLE_S)
            tokens = sum(r.output_tokens or 0 for r in records)
            after = SpeculationCounter.read(server.get("/metrics").text)
            count = after.since(before, tokens, len(records))
        sample = make_sample(
            block,
            mode,
            records,
            count,
            lead_tokens=self._lead_tokens,
            others_cpu_share=share,
        )
        self.samples.append(sample)
        self.records.append(BlockRecords(block.number, mode, records))
        self._on_sample(sample)

    async def _load(self, block: Block, mode: str, server: ServerProcess) -> list[RequestRecord]:
        args = self._args

        def note(record: RequestRecord) -> None:
            if mode == self._lead:
                self._lead_tokens += record.output_tokens or 0
                self._lead_requests += 1

        arrivals = None
        if args.rate is not None:
            arrivals = arrival_times(len(block.prompts), args.rate, args.seed, block.number)
            if args.burst is not None:
                arrivals = with_bursts(arrivals, args.burst)
        async with make_client(server.openai_url) as client:
            options = LoadOptions(
                model=await served_model(client),
                concurrency=block.concurrency,
                max_tokens=args.max_tokens,
                temperature=args.temperature,
                top_p=args.top_p,
                seed=args.seed + SEEDS_A_BLOCK * block.number if args.temperature > 0 else None,
                deadline_s=args.deadline,
            )
            polling = asyncio.create_task(self._poll(server)) if mode == ONLINE else None
            try:
                return await send_block(
                    client,
                    block.prompts,
                    options,
                    origin=self._origin,
                    arrivals=arrivals,
                    on_record=note,
                )
            finally:
                if polling is not None:
                    polling.cancel()
                    await asyncio.gather(polling, return_exceptions=True)

    async def _poll(self, server: ServerProcess) -> None:
        """Until cancelled. A failed poll is a reading with an error."""
        async with httpx.AsyncClient(
            base_url=server.openai_url, trust_env=False, timeout=30
        ) as http:
            while True:
                try:
                    response = await http.get("/paceline/status")
                    response.raise_for_status()
                    reading = read_status(
                        response.json(), self._now(), self._lead_tokens, self._lead_requests
                    )
                except (httpx.HTTPError, ValueError, KeyError) as error:
                    reading = Reading(
                        time=self._now(),
                        tokens=self._lead_tokens,
                        requests=self._lead_requests,
                        error=f"{type(error).__name__}: {error}",
                    )
                self.readings.append(reading)
                await asyncio.sleep(self._args.poll)

    def _now(self) -> float:
        return time.perf_counter() - self._origin


async def warm_up(server: ServerProcess) -> None:
    async with make_client(server.openai_url) as client:
        model = await served_model(client)
        for text in WARM_UP:
            await client.chat.completions.create(
                model=model,
                messages=[{"role": "user", "content": text}],
                max_tokens=32,
                temperature=0.0,
                extra_headers={"x-paceline-learn": "false"},
            )


def _cpu_seconds(servers: Sequence[ServerProcess]) -> float:
    return sum(server.cpu_seconds() for server in servers)


def _check(mode: str, server: ServerProcess, records: Sequence[RequestRecord]) -> None:
    """A failed request is counted; a block in which none was served ends the run."""
    if not server.alive:
        raise ServerFailed(f"the {mode} server ended", None, server.tail())
    if all(record.error for record in records):
        raise BenchError(f"no request of a block was served by {mode}: {records[0].error}")
