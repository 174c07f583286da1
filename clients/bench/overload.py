"""Several times the load a server can bear, from locust: what it serves, what it refuses, what it costs.

Capacity is measured first: answers a second when as many requests as it works on at once are always under
way. Then --factor times as many arrive a second for --seconds, from users who each ask once in a while and
do not wait for each other. While that lasts, the memory of the server's process tree and its health are
read. Then it is asked once a second, until an answer comes as quickly as before the load.

The JSON holds, beside the machine and the options:
  capacity_per_s, capacity_tokens_per_s   measured closed-loop
  alone_s       of a request to the idle server
  users, pace_s how many users there were, and how often each asks
  figures       clients/bench/overload_figures.py
  recovery_s    from the end of the load to the first answer as quick as before; null if there was none
  same_processes  whether the engine that was there at the end is the one of the start
  readings      memory and health over time
"""

from __future__ import annotations

import argparse
import asyncio
import math
import tempfile
import time
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import httpx

from clients.bench import common
from clients.bench.overload_figures import Reading, figures
from clients.bench.overload_load import events_in, start_locust, wait_for_first
from clients.bench.processes import engine_of, memory_by_part
from clients.load import LoadOptions, make_client, run_load, send, served_model
from clients.process import ServerProcess
from clients.summary import served
from clients.workload import Prompt

AS_BEFORE = 1.5
"""An answer that takes at most so many times as long as before the load is as quick as before."""

RECOVERY_DEADLINE_S = 180.0

READ_EVERY_S = 2.0


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m clients.bench.overload",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="Flags after a lone -- go to `paceline serve` as they are.",
    )
    add = parser.add_argument
    add("--seconds", type=float, default=300.0, help="of the load (default: 300)")
    add("--factor", type=float, default=4.0, help="times the capacity (default: 4)")
    add(
        "--capacity-seconds", type=float, default=30.0, help="that it is measured for (default: 30)"
    )
    add("--running", type=int, default=8, help="requests worked on at once (default: 8)")
    add("--max-tokens", type=int, default=32, help="of every answer (default: 32)")
    add("--deadline", type=float, default=120.0, metavar="S", help="of a request (default: 120)")
    add("--target", default="embedded", help="default: embedded")
    add("--seed", type=int, default=0, help="of the prompts (default: 0)")
    add("--start-deadline", type=float, default=900.0, metavar="S", help="default: 900")
    add("--json", type=Path, metavar="FILE", help="write everything measured here")
    args = common.parse(parser, argv)
    if find_spec("locust") is None:
        parser.error("this needs locust; pip install -e '.[dev]'")
    for name in ("seconds", "factor", "capacity_seconds", "running", "max_tokens", "deadline"):
        if vars(args)[name] <= 0:
            parser.error(f"--{name.replace('_', '-')} must be above 0")
    return args


def make_server(args: argparse.Namespace, home: Path) -> ServerProcess:
    flags = [
        "--target", args.target, "--max-running", str(args.running), "--kv-cache-gib", "0.5",
        *args.serve_flags,
    ]  # fmt: skip
    return ServerProcess(home, flags, start_deadline_s=args.start_deadline)


def options_for(args: argparse.Namespace, model: str) -> LoadOptions:
    return LoadOptions(
        model=model, concurrency=args.running, max_tokens=args.max_tokens, ignore_eos=True,
        deadline_s=args.deadline, token_ids=False,
    )  # fmt: skip


def prompts(word: str) -> Any:
    """Without end, no two alike."""
    number = 0
    while True:
        number += 1
        yield Prompt(f"{word}-{number}", (f"Write the {number}th tale of a {word} and a river.",))


async def alone(args: argparse.Namespace, server: ServerProcess, model: str, word: str) -> float:
    """Seconds of one request; raises BenchError when it fails."""
    async with make_client(server.openai_url) as client:
        record = await send(
            client, next(prompts(word)), options_for(args, model), origin=time.perf_counter()
        )
    if record.error is not None:
        raise common.BenchError(f"a request to the idle server failed: {record.error}")
    return record.ended - record.started


async def capacity_of(
    args: argparse.Namespace, server: ServerProcess, model: str
) -> tuple[float, float]:
    """Requests and tokens a second with ``--running`` requests under way all the time."""
    async with make_client(server.openai_url) as client:
        result = await run_load(
            client, prompts("capacity"), options_for(args, model), until=args.capacity_seconds
        )
    good = served(result.records)
    if len(good) < len(result.records) or not good:
        raise common.BenchError(
            f"{len(result.records) - len(good)} requests failed within capacity"
        )
    seconds = result.ended - result.started
    return len(good) / seconds, sum(r.output_tokens or 0 for r in good) / seconds


async def watch(server: ServerProcess, begun: float, readings: list[Reading]) -> None:
    """Until it is cancelled."""
    async with httpx.AsyncClient(base_url=server.url, timeout=30, trust_env=False) as client:
        while True:
            asked = time.time()
            health = None
            with suppress(httpx.HTTPError):  # the reading says that there was no answer
                health = (await client.get("/health")).status_code
            seconds = time.time() - asked
            parts = await asyncio.to_thread(memory_by_part, server.pid)
            readings.append(Reading(at=asked - begun, parts=parts, health=health, health_s=seconds))
            await asyncio.sleep(READ_EVERY_S)


async def recover(
    args: argparse.Namespace, server: ServerProcess, model: str, before: float
) -> float | None:
    """Seconds until a request took no longer than before; None when none did by the deadline."""
    begun = time.monotonic()
    tries = prompts("recovery")
    async with make_client(server.openai_url) as client:
        while time.monotonic() - begun < RECOVERY_DEADLINE_S:
            options = options_for(args, model)
            record = await send(client, next(tries), options, origin=time.perf_counter())
            if record.error is None and record.ended - record.started <= AS_BEFORE * before:
                return time.monotonic() - begun
            await asyncio.sleep(1.0)
    return None


async def measure(args: argparse.Namespace, server: ServerProcess, folder: Path) -> dict[str, Any]:
    """Everything but the machine and the options; ``folder`` takes locust's files."""
    async with make_client(server.openai_url) as client:
        model = await served_model(client)
    await alone(args, server, model, "first")  # what is made ready at the first request
    before = sorted([await alone(args, server, model, f"quiet{i}") for i in range(3)])[1]
    capacity, tokens = await capacity_of(args, server, model)
    pace = 1.5 * 2 * args.running / capacity + 5.0  # a user is back before its next turn
    users = math.ceil(args.factor * capacity * pace)
    engine = engine_of(server)
    out = folder / "events.jsonl"
    readings: list[Reading] = []
    process = await start_locust(args, server, out, users, pace, model)
    try:
        begun = await wait_for_first(out, process)
        watching = asyncio.create_task(watch(server, begun, readings))
        await asyncio.sleep(max(0.0, begun + args.seconds - time.time()))
        recovery = await recover(args, server, model, before)
        await asyncio.wait_for(process.wait(), args.deadline + pace + 60)
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    parts = memory_by_part(server.pid)
    readings.append(Reading(at=time.time() - begun, parts=parts, health=200, health_s=0.0))
    return {
        "capacity_per_s": capacity,
        "capacity_tokens_per_s": tokens,
        "alone_s": before,
        "users": users,
        "pace_s": pace,
        "figures": figures(events_in(out), readings, begun, args.seconds, capacity),
        "recovery_s": recovery,
        "same_processes": server.alive and engine_of(server) == engine,
        "readings": readings,
    }


def fit(report: dict[str, Any]) -> bool:
    """Whether the server did what it should."""
    figured = report["figures"]
    return bool(
        report["same_processes"]
        and report["recovery_s"] is not None
        and figured.served
        and figured.refused_rightly
        and not figured.refused_wrongly
        and not figured.others
        and not figured.health_failures
    )


def show(report: dict[str, Any]) -> None:
    figured = report["figures"]
    say = common.console.print
    say(
        f"capacity {report['capacity_per_s']:.2f} requests/s; offered {figured.offered_per_s:.2f} "
        f"({figured.offered_over_capacity:.1f}x, at most {figured.busiest_second} in a second), "
        f"served {figured.served_per_s:.2f} ({figured.served_over_capacity:.2f}x); answers {figured.statuses}"
    )
    rows = []
    for name in ("first_token_s", "latency_s", "refusal_s", "retry_after_s"):
        q = getattr(figured, name)
        rows.append([name, *((q.count, q.p50, q.p95, q.max) if q else (0, None, None, None))])
    rows.append(["alone_s", 1, report["alone_s"], None, None])
    common.print_table("seconds", ("", "count", "p50", "p95", "max"), rows)
    memory = figured.memory
    by_part = ", ".join(f"{part} {size >> 20}" for part, size in memory.late_growth_by_part.items())
    say(
        f"memory MiB: start {memory.start >> 20}, peak {memory.peak >> 20}, end {memory.end >> 20}, "
        f"growth from the second quarter to the last {memory.late_growth >> 20} ({by_part})"
    )
    say(
        f"429: {figured.refused_rightly} right, {figured.refused_wrongly} wrong; broken streams "
        f"{figured.broken}; health failures {figured.health_failures}, slowest "
        f"{figured.health_slowest_s:.2f} s; recovery {common.show(report['recovery_s'])} s; "
        f"same processes: {report['same_processes']}"
    )


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    facts = common.machine_facts()
    folder = Path(tempfile.mkdtemp(prefix="paceline-overload-"))
    with make_server(args, folder / "home") as server:
        report = asyncio.run(measure(args, server, folder))
    common.write_json(
        args.json, {"benchmark": "overload", "machine": facts, "options": vars(args), **report}
    )
    show(report)
    return 0 if fit(report) else 1


if __name__ == "__main__":
    common.run_main(main)
