"""What the learner costs serving: a server's speed with its learner running and stopped, in turns.

Streams run without a break, so many at a time; the learner is stopped (SIGSTOP) in every second window
and goes on after it. It is made to train all the time and to publish nothing. What came in while
it was stopped it takes in afterwards, so the windows with it hold up to twice their share of that. A
learner that trains less than half of what it does without load is no measure of what learning costs:
such a result is void, and says so (exit code 1).

The JSON holds, beside the head that every benchmark's has:
  weights    of each concurrency: with over without, paired; what was trained (fields in
             clients/bench/weight_figures.py, Weight)
  windows    by concurrency: each window's own figures (WindowFigures)
  idle_rate  positions/s that the learner trains without load, before and after the windows
  flags      of the server; status: its own word at the end
"""

from __future__ import annotations

import argparse
import asyncio
import math
import signal
import tempfile
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import psutil

from clients.bench import common
from clients.bench.paired import RatioSpread
from clients.bench.weight_figures import (
    WITH,
    Trained,
    Weight,
    Window,
    WindowFigures,
    rate_of,
    weight_of,
    window_figures,
    window_order,
)
from clients.load import LoadOptions, LoadResult, make_client, run_load, served_model
from clients.process import ServerProcess
from clients.workload import Prompt

LEARNING = (
    "--learner", "local",
    "--learning.replay-ratio", "1000",
    "--learning.publish-interval-s", "3600",
    "--learning.gate-tokens", "1000000000",
)  # fmt: skip
"""Always something to train on. Judgements take the learner's time and change the drafter: the first
one is due as soon as the gate has its tokens, so it never has them."""

LEAD_S = 2.5
"""From a change to the window's begin: the learner reports once a second, between two updates."""

WARM_UP_STREAMS = 4
WARM_UP_DEADLINE_S = 600.0
"""For the learner to have enough traffic to train on."""

POLL_S = 1.0


def trained_of(status: dict[str, Any], pid: int) -> Trained:
    """The learner's last report, at the time when it was made. Raises BenchError for another process."""
    learner = status["learner"]
    if learner["pid"] != pid:
        raise common.BenchError(f"the learner (process {pid}) has ended; see the server's log")
    return Trained(time.perf_counter() - learner["age_s"], learner["tokens_seen"])


def open_http(server: ServerProcess) -> httpx.AsyncClient:
    return httpx.AsyncClient(base_url=server.url, trust_env=False, timeout=30)


async def read_status(http: httpx.AsyncClient) -> dict[str, Any]:
    response = await http.get("/v1/paceline/status")
    body: dict[str, Any] = response.raise_for_status().json()
    return body


@contextmanager
def running_at_the_end(process: psutil.Process) -> Iterator[None]:
    """A process that may be stopped inside goes on afterwards, whatever happens."""
    try:
        yield
    except psutil.NoSuchProcess:
        raise common.BenchError(f"the learner (process {process.pid}) has ended") from None
    finally:
        with suppress(psutil.NoSuchProcess):
            process.send_signal(signal.SIGCONT)


@asynccontextmanager
async def under_load(
    args: argparse.Namespace, server: ServerProcess, prompts: Iterator[Prompt], concurrency: int
) -> AsyncIterator[tuple[float, asyncio.Task[LoadResult]]]:
    """Streams run inside; (the origin of their times, their outcome, which is there afterwards).

    Raises BenchError when a request failed or the prompts ran out.
    """
    origin = time.perf_counter()
    stop = asyncio.Event()
    async with make_client(server.openai_url) as client:
        options = LoadOptions(
            model=await served_model(client),
            concurrency=concurrency,
            max_tokens=args.max_tokens,
            temperature=args.temperature,
            top_p=args.top_p,
            deadline_s=args.deadline,
        )
        load = asyncio.create_task(run_load(client, prompts, options, origin=origin, stop=stop))
        try:
            yield origin, load
        except BaseException:
            load.cancel()
            raise
        stop.set()
        result = await load
    failed = [record for record in result.records if record.error]
    if failed:
        raise common.BenchError(f"{len(failed)} requests failed; the first: {failed[0].error}")
    if result.ended_by == "prompts":
        raise common.BenchError("no prompts are left, and none is sent twice; give more of them")


async def warm_up(
    args: argparse.Namespace, server: ServerProcess, prompts: Iterator[Prompt]
) -> None:
    """Send requests until the learner trains."""
    begun = time.monotonic()
    async with (
        open_http(server) as http,
        under_load(args, server, prompts, WARM_UP_STREAMS) as (
            _,
            load,
        ),
    ):
        while not (await read_status(http))["learner"].get("tokens_seen"):
            if load.done():
                return  # out of prompts, or failed: the load's end says so
            if time.monotonic() - begun > WARM_UP_DEADLINE_S:
                raise common.BenchError(
                    f"the learner did not train within {WARM_UP_DEADLINE_S:g} s of traffic"
                )
            await asyncio.sleep(POLL_S)


async def train_without_load(
    args: argparse.Namespace, server: ServerProcess, learner: psutil.Process
) -> tuple[Trained, Trained]:
    """The learner's reports at both ends of ``--idle`` seconds."""
    async with open_http(server) as http:
        await asyncio.sleep(LEAD_S)
        before = trained_of(await read_status(http), learner.pid)
        await asyncio.sleep(args.idle)
        return before, trained_of(await read_status(http), learner.pid)


async def measure(
    args: argparse.Namespace,
    server: ServerProcess,
    learner: psutil.Process,
    prompts: Iterator[Prompt],
    concurrency: int,
) -> list[WindowFigures]:
    """All windows of one concurrency, under one load."""
    windows: list[Window] = []
    with running_at_the_end(learner):
        async with (
            open_http(server) as http,
            under_load(args, server, prompts, concurrency) as (origin, load),
        ):
            for pair, name in window_order(args.pairs):
                if load.done():
                    break  # out of prompts, or failed: the load's end says so
                learner.send_signal(signal.SIGCONT if name == WITH else signal.SIGSTOP)
                await asyncio.sleep(LEAD_S)
                begin = time.perf_counter() - origin
                before = trained_of(await read_status(http), learner.pid)
                await asyncio.sleep(args.window)
                after = trained_of(await read_status(http), learner.pid)
                windows.append(
                    Window(
                        pair=pair,
                        learner=name,
                        begin=begin,
                        end=time.perf_counter() - origin,
                        trained=(before, after) if name == WITH else None,
                    )
                )
        records = load.result().records
    found = [window_figures(records, window) for window in windows]
    for figures in found:
        common.console.print(
            f"concurrency {concurrency}, pair {figures.window.pair + 1}/{args.pairs}, "
            f"{figures.window.learner}: {figures.tokens_per_second:.1f} tokens/s"
        )
    return found


def print_report(weights: Sequence[Weight], idle_rate: float) -> None:
    def ratio(value: RatioSpread | None) -> str:
        if value is None:
            return "-"
        return f"{value.median:.3f} ({value.min:.3f} - {value.max:.3f})"

    milliseconds = common.milliseconds
    for w in weights:
        beside, alone = f"{w.with_tokens_per_second:.1f}", f"{w.without_tokens_per_second:.1f}"
        p50 = milliseconds(w.with_gap_p50_s), milliseconds(w.without_gap_p50_s)
        p99 = milliseconds(w.with_gap_p99_s), milliseconds(w.without_gap_p99_s)
        common.print_table(
            f"{w.concurrency} at a time, {w.tokens_per_second.pairs} pairs of windows",
            ["", "with", "without", "ratio (range)"],
            [
                ["tokens/s", beside, alone, ratio(w.tokens_per_second)],
                ["between chunks, p50", *p50, ratio(w.gap_p50)],
                ["between chunks, p99", *p99, ratio(w.gap_p99)],
                ["trained positions/s", f"{w.trained_per_second:.0f}", 0, "-"],
            ],
        )
        if w.void is not None:
            common.console.print(f"VOID: {w.void}.")
    common.console.print(f"Without load the learner trains {idle_rate:.0f} positions/s.")


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = common.make_parser("learner_weight", __doc__, max_tokens=128)
    parser.set_defaults(draft="auto")
    add = parser.add_argument
    add("--concurrency", type=int, nargs="+", default=[1, 4], metavar="N", help="default: 1 4")
    add("--window", type=float, default=30.0, metavar="S", help="length of one (default: 30)")
    add("--pairs", type=int, default=6, help="of windows, at each concurrency (default: 6)")
    add("--idle", type=float, default=45.0, metavar="S", help="without load, twice (default: 45)")
    add("--home", type=Path, help="new folder for the server's home (default: a temporary one)")
    args = common.parse(parser, argv)
    for name in ("window", "pairs", "idle", "max_tokens"):
        value = vars(args)[name]
        if not (value > 0 and math.isfinite(value)):
            parser.error(f"--{name} must be above 0".replace("_", "-"))
    if min(args.concurrency) < 1 or len(set(args.concurrency)) < len(args.concurrency):
        parser.error("--concurrency takes numbers of at least 1, each once")
    if args.home is not None and args.home.exists():
        parser.error(f"--home {args.home} is there already; what it has learned would count")
    return args


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    chosen = common.prompts_of(args)
    prompts = iter(chosen.prompts)
    facts = common.machine_facts()
    home = args.home or Path(tempfile.mkdtemp(prefix="paceline-weight-")) / "home"
    server = ServerProcess(
        home, common.serve_flags(args, *LEARNING), start_deadline_s=args.start_deadline
    )
    common.console.print(f"log: {server.log}")
    windows: dict[int, list[WindowFigures]] = {}
    with server:
        asyncio.run(warm_up(args, server, prompts))
        begun = server.status()
        learner = psutil.Process(begun["learner"]["pid"])
        common.console.print(f"the learner trains (process {learner.pid})")
        idle = [asyncio.run(train_without_load(args, server, learner))]
        for concurrency in args.concurrency:
            windows[concurrency] = asyncio.run(measure(args, server, learner, prompts, concurrency))
        idle.append(asyncio.run(train_without_load(args, server, learner)))
        status = server.status()
    if status["swaps"]["count"] != begun["swaps"]["count"]:
        raise common.BenchError("the drafter changed in between; the windows are not comparable")
    idle_rate = rate_of(idle)
    weights = [weight_of(concurrency, found, idle_rate) for concurrency, found in windows.items()]
    print_report(weights, idle_rate)
    details = {
        "weights": weights,
        "windows": {str(concurrency): found for concurrency, found in windows.items()},
        "idle_rate": idle_rate,
        "idle": idle,
        "flags": server.flags,
        "status": status,
    }
    common.write_json(args.json, common.report("learner_weight", facts, args, chosen) | details)
    return 1 if any(weight.void for weight in weights) else 0


if __name__ == "__main__":
    common.run_main(main)
