"""Swaps under load: alternates two draft versions while streams run, and looks for harm.

The home (--home) must hold at least two draft versions; a day0 run leaves such a one. No learner
runs.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
import msgspec

from clients.bench import common
from clients.load import LoadOptions, LoadResult, RequestRecord, make_client, run_load, served_model
from clients.process import ServerProcess
from clients.summary import Spread, longest_stall, served, split_excess, spread, summarize

BOUND_S = 0.250
"""Longest stall beyond a stream's median step that the design allows."""


class Swap(msgspec.Struct):
    """One activation; ``seconds`` is how long the engine stood still, by the server's word."""

    version: int
    begun: float
    ended: float
    streams: int
    """Streams that were receiving tokens both before and after it."""
    seconds: float | None = None
    error: str | None = None


class SwapReport(msgspec.Struct):
    asked: int
    done: int
    failed: int
    counted_by_server: int
    requests: int
    failed_requests: int
    restarted_requests: int
    preemptions: float
    """Requests that the scheduler threw out and computed anew, from vLLM's own counter."""
    crossed: int
    """Requests in which more than one draft version took steps."""
    fewest_streams: int
    median_streams: float
    """Streams that were running across a swap."""
    swap_s: Spread | None
    round_trip_s: Spread | None
    stall_s: Spread | None
    """A value a stream: longest gap less median step."""
    around_s: Spread | None
    """Gaps that overlap a swap, less the stream's median step."""
    elsewhere_s: Spread | None


def crossing(records: Sequence[RequestRecord], begun: float, ended: float) -> int:
    """Streams with tokens both before and after the interval."""
    return sum(
        bool(r.chunk_times) and r.chunk_times[0] <= begun and r.chunk_times[-1] >= ended
        for r in records
    )


def report_of(
    result: LoadResult, swaps: Sequence[Swap], counted: int, preemptions: float
) -> SwapReport:
    good = served(result.records)
    done = [s for s in swaps if s.error is None]
    intervals = [(s.begun, s.ended) for s in swaps]
    around: list[float] = []
    elsewhere: list[float] = []
    for record in good:
        near, far = split_excess(record.chunk_times, intervals)
        around += near
        elsewhere += far
    stalls = [longest_stall(r.chunk_times) for r in good]
    versions = [{c.version for c in r.versions or () if c.steps or c.plain_steps} for r in good]
    return SwapReport(
        asked=len(swaps),
        done=len(done),
        failed=len(swaps) - len(done),
        counted_by_server=counted,
        requests=len(result.records),
        failed_requests=len(result.records) - len(good),
        restarted_requests=sum(r.restarted for r in result.records),
        preemptions=preemptions,
        crossed=sum(len(v) > 1 for v in versions),
        fewest_streams=min((s.streams for s in swaps), default=0),
        median_streams=statistics.median([s.streams for s in swaps] or [0]),
        swap_s=spread(s.seconds for s in done if s.seconds is not None),
        round_trip_s=spread(s.ended - s.begun for s in done),
        stall_s=spread(s for s in stalls if s is not None),
        around_s=spread(around),
        elsewhere_s=spread(elsewhere),
    )


def choose_pair(
    drafts: Sequence[dict[str, Any]], live: int, wanted: Sequence[int] | None
) -> tuple[int, int]:
    """The two versions to alternate, the one to activate first in front (it is not live)."""
    known = sorted(draft["version"] for draft in drafts)
    if wanted is not None:
        missing = [v for v in wanted if v not in known]
        if missing or len(set(wanted)) != 2:
            raise common.BenchError(f"--versions {wanted}: the home holds {known}")
        pair = list(wanted)
    else:
        others = [v for v in known if v != live]
        if not others:
            raise common.BenchError(
                f"the home holds only version {live}; run day0 with this --home first"
            )
        pair = [others[-1], live]
    return (pair[1], pair[0]) if pair[0] == live else (pair[0], pair[1])


def metric_total(text: str, name: str) -> float:
    """Sum of a Prometheus counter over its labels."""
    total = 0.0
    for line in text.splitlines():
        if line.startswith((name + "{", name + " ")):
            total += float(line.rsplit(" ", 1)[1])
    return total


async def activate(http: httpx.AsyncClient, version: int, origin: float) -> Swap:
    begun = time.perf_counter() - origin
    swap = Swap(version, begun, begun, 0)
    try:
        response = await http.post(f"/v1/paceline/drafts/{version}/activate")
        swap.ended = time.perf_counter() - origin
        if response.status_code != 200:
            swap.error = f"HTTP {response.status_code}: {response.text[:300]}"
        else:
            body = response.json()
            swap.seconds = body["seconds"]
            if body["live"] != version:
                swap.error = f"version {body['live']} is live after it"
            elif not swap.seconds:
                swap.error = "the version was live already, nothing was swapped"
    except (httpx.HTTPError, ValueError, KeyError) as error:
        swap.ended = time.perf_counter() - origin
        swap.error = f"{type(error).__name__}: {error}"
    return swap


async def measure(
    args: argparse.Namespace, url: str, prompts: Sequence[Any], pair: tuple[int, int]
) -> tuple[LoadResult, list[Swap], float]:
    swaps: list[Swap] = []
    stop = asyncio.Event()
    origin = time.perf_counter()
    async with (
        make_client(f"{url}/v1") as client,
        httpx.AsyncClient(base_url=url, trust_env=False, timeout=120) as http,
    ):
        options = LoadOptions(
            model=await served_model(client),
            concurrency=args.concurrency,
            max_tokens=args.max_tokens,
            temperature=args.temperature,
            top_p=args.top_p,
            deadline_s=args.deadline,
            ignore_eos=True,
        )

        async def preemptions() -> float:
            return metric_total((await http.get("/metrics")).text, "vllm:num_preemptions_total")

        async def swapping() -> None:
            for i in range(args.swaps):
                await asyncio.sleep(args.interval)
                if load.done():
                    return
                swap = await activate(http, pair[i % 2], origin)
                swaps.append(swap)
                outcome = swap.error or f"engine stood still {common.milliseconds(swap.seconds)}"
                common.console.print(f"swap {i + 1:>3} to v{swap.version}: {outcome}")
            await asyncio.sleep(args.interval)
            stop.set()

        before = await preemptions()
        load = asyncio.create_task(run_load(client, prompts, options, origin=origin, stop=stop))
        await swapping()
        result = await load
        preempted = await preemptions() - before
    for swap in swaps:
        swap.streams = crossing(result.records, swap.begun, swap.ended)
    if len(swaps) < args.swaps:
        raise common.BenchError(
            f"the load ended ({result.ended_by}) after {len(swaps)} of {args.swaps} swaps; "
            "give more prompts, a larger --max-tokens or a smaller --interval"
        )
    return result, swaps, preempted


def print_report(report: SwapReport) -> None:
    common.print_table(
        "Swaps under load",
        ["", "figure"],
        [
            ["swaps asked / done / failed", f"{report.asked} / {report.done} / {report.failed}"],
            ["swaps counted by the server", report.counted_by_server],
            [
                "requests / failed / restarted",
                f"{report.requests} / {report.failed_requests} / {report.restarted_requests}",
            ],
            ["requests preempted", f"{report.preemptions:.0f}"],
            ["requests served by more than one version", report.crossed],
            [
                "streams running across a swap, median / fewest",
                f"{report.median_streams:g} / {report.fewest_streams}",
            ],
        ],
    )
    common.print_table(
        "Times",
        ["", "count", "p50", "p90", "p99", "max"],
        [
            common.spread_row("swap, engine stood still", report.swap_s),
            common.spread_row("swap, round trip", report.round_trip_s),
            common.spread_row("longest gap - median step, by stream", report.stall_s),
            common.spread_row("gap - median step, gaps at a swap", report.around_s),
            common.spread_row("gap - median step, elsewhere", report.elsewhere_s),
        ],
    )
    if report.stall_s is not None:
        verdict = "within" if report.stall_s.max <= BOUND_S else "ABOVE"
        common.console.print(
            f"Longest stall beyond the median step: {common.milliseconds(report.stall_s.max)}, "
            f"{verdict} the allowed {common.milliseconds(BOUND_S)}."
        )


def main(argv: Sequence[str] | None = None) -> int:
    parser = common.make_parser("swaps", __doc__, max_tokens=192)
    parser.add_argument(
        "--home", type=Path, required=True, help="a home folder with at least two draft versions"
    )
    parser.add_argument(
        "--versions",
        type=int,
        nargs=2,
        metavar=("A", "B"),
        help="default: the live one and the newest other",
    )
    parser.add_argument("--swaps", type=int, default=20, metavar="N", help="default: 20")
    parser.add_argument(
        "--interval", type=float, default=3.0, metavar="S", help="between swaps (default: 3)"
    )
    parser.add_argument("--concurrency", type=int, default=4, help="default: 4")
    args = common.parse(parser, argv)
    chosen = common.prompts_of(args)
    if not args.home.is_dir():
        raise common.BenchError(f"{args.home} is no folder; run day0 with this --home first")
    facts = common.machine_facts()
    server = ServerProcess(
        args.home,
        common.serve_flags(args, "--learner", "off"),
        start_deadline_s=args.start_deadline,
    )
    with server:
        before = server.status()
        pair = choose_pair(server.drafts(), before["draft"]["live"], args.versions)
        common.console.print(f"alternating v{pair[0]} and v{pair[1]}; log: {server.log}")
        result, swaps, preempted = asyncio.run(measure(args, server.url, chosen.prompts, pair))
        after = server.status()
    report = report_of(result, swaps, after["swaps"]["count"] - before["swaps"]["count"], preempted)
    print_report(report)
    common.write_json(
        args.json,
        common.report("swaps", facts, args, chosen)
        | {
            "flags": server.flags,
            "pair": pair,
            "report": report,
            "summary": summarize(result.records),
            "swaps": swaps,
            "records": result.records,
            "status_before": before,
            "status_after": after,
        },
    )
    harmed = report.failed or report.failed_requests or report.restarted_requests
    return 1 if harmed else 0


if __name__ == "__main__":
    common.run_main(main)
