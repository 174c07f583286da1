"""What capture costs: tokens/s of two servers, capture on and off, in turns on the same prompts.

No learner runs. A drain stands in its place, takes the traces and throws them away, because a
server without anyone to send to captures nothing. While one server is measured the other has no
requests; the processor time it used all the same is reported. Each round has new prompts, so that
no round profits from a prefix cache.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from clients.bench import common
from clients.bench.drain import DrainProcess
from clients.bench.paired import ratio_spread
from clients.load import LoadOptions, make_client, run_load, served_model
from clients.process import ServerProcess
from clients.summary import summarize
from clients.workload import Prompt

SETTLE_S = 1.0
"""Between two measurements, so that background threads come to rest."""


class Run(msgspec.Struct):
    """One server on one set of prompts."""

    tokens_per_second: float
    output_tokens: int
    failed: int
    gap_p50_s: float | None
    gap_p99_s: float | None
    idle_cpu_share: float
    """Processor time of the other server, as a share of one core."""


class Pair(msgspec.Struct):
    """The same prompts on both servers, one right after the other."""

    round: int
    concurrency: int
    first: str
    on: Run
    off: Run

    @property
    def ratio(self) -> float:
        return self.on.tokens_per_second / self.off.tokens_per_second


class Ratio(msgspec.Struct):
    """On over off; 1 means that capture costs nothing."""

    concurrency: int
    rounds: int
    median: float
    p25: float
    p75: float
    min: float
    max: float
    on_tokens_per_second: float
    off_tokens_per_second: float
    on_gap_p50_s: float | None
    off_gap_p50_s: float | None


def ratio_of(concurrency: int, pairs: Sequence[Pair]) -> Ratio:
    """Spread of the paired ratios at one concurrency, and both servers' median tokens/s."""
    mine = [p for p in pairs if p.concurrency == concurrency]
    found = ratio_spread((p.on.tokens_per_second, p.off.tokens_per_second) for p in mine)
    assert found is not None  # a round in which nothing was served ends the benchmark
    return Ratio(
        concurrency,
        found.pairs,
        found.median,
        found.p25,
        found.p75,
        found.min,
        found.max,
        float(np.median([p.on.tokens_per_second for p in mine])),
        float(np.median([p.off.tokens_per_second for p in mine])),
        median_of(p.on.gap_p50_s for p in mine),
        median_of(p.off.gap_p50_s for p in mine),
    )


def median_of(values: Any) -> float | None:
    known = [value for value in values if value is not None]
    return float(np.median(known)) if known else None


def order(round_number: int, position: int) -> tuple[str, str]:
    """Who goes first: in turns, from round to round and from one concurrency to the next."""
    return ("on", "off") if (round_number + position) % 2 == 0 else ("off", "on")


async def load_once(
    args: argparse.Namespace, server: ServerProcess, prompts: Sequence[Prompt], concurrency: int
):
    async with make_client(server.openai_url) as client:
        options = LoadOptions(
            model=await served_model(client),
            concurrency=concurrency,
            max_tokens=args.max_tokens,
            temperature=args.temperature,
            top_p=args.top_p,
            deadline_s=args.deadline,
            ignore_eos=True,
        )
        return await run_load(client, prompts, options)


def measure_one(
    args: argparse.Namespace,
    server: ServerProcess,
    other: ServerProcess,
    prompts: Sequence[Prompt],
    concurrency: int,
) -> Run:
    time.sleep(SETTLE_S)
    idle, begun = other.cpu_seconds(), time.monotonic()
    result = asyncio.run(load_once(args, server, prompts, concurrency))
    share = (other.cpu_seconds() - idle) / (time.monotonic() - begun)
    summary = summarize(result.records)
    if summary.failed:
        first = next(r.error for r in result.records if r.error)
        raise common.BenchError(
            f"{summary.failed} of {summary.requests} requests failed; the first: {first}"
        )
    if len(result.records) != len(prompts):
        raise common.BenchError(f"only {len(result.records)} of {len(prompts)} prompts were sent")
    gap = summary.gap_s
    return Run(
        summary.tokens_per_second,
        summary.output_tokens,
        summary.failed,
        None if gap is None else gap.p50,
        None if gap is None else gap.p99,
        share,
    )


def measure(
    args: argparse.Namespace, servers: dict[str, ServerProcess], prompts: Sequence[Prompt]
) -> list[Pair]:
    sizes = [args.waves * concurrency for concurrency in args.concurrency]
    common.take(prompts, max(sizes) + args.rounds * sum(sizes), f"{args.rounds} rounds")
    warm, prompts = common.take(prompts, max(sizes), "the warm-up")
    for name, other in (("on", "off"), ("off", "on")):
        measure_one(args, servers[name], servers[other], warm, max(args.concurrency))
    pairs = []
    for number in range(args.rounds):
        for position, (concurrency, size) in enumerate(zip(args.concurrency, sizes, strict=True)):
            chosen, prompts = common.take(prompts, size, "a round")
            first, second = order(number, position)
            runs = {
                name: measure_one(args, servers[name], servers[other], chosen, concurrency)
                for name, other in ((first, second), (second, first))
            }
            pair = Pair(number, concurrency, first, runs["on"], runs["off"])
            pairs.append(pair)
            common.console.print(
                f"round {number + 1}/{args.rounds}, concurrency {concurrency}: "
                f"on {pair.on.tokens_per_second:.1f}, off {pair.off.tokens_per_second:.1f} "
                f"tokens/s, ratio {pair.ratio:.3f}"
            )
    return pairs


def check_capture(before: dict[str, Any], after: dict[str, Any], received: int) -> None:
    """A comparison of two servers that both capture, or both do not, would say nothing."""
    captured = {name: after[name]["captured"] - before[name]["captured"] for name in after}
    if captured["on"] == 0 or received == 0:
        raise common.BenchError(
            f"with capture on, {captured['on']} spans were captured and {received} arrived; "
            "there is nothing to compare"
        )
    if captured["off"] > 0:
        raise common.BenchError(f"the server with --no-capture captured {captured['off']} spans")


def print_report(
    ratios: Sequence[Ratio], pairs: Sequence[Pair], traces: dict[str, Any], received: dict[str, int]
) -> None:
    common.print_table(
        "Capture on over off, tokens/s, paired",
        [
            "concurrency",
            "rounds",
            "median ratio",
            "quartiles",
            "range",
            "on tokens/s",
            "off tokens/s",
            "on step",
            "off step",
        ],
        [
            [
                str(r.concurrency),
                r.rounds,
                r.median,
                f"{r.p25:.3f} - {r.p75:.3f}",
                f"{r.min:.3f} - {r.max:.3f}",
                f"{r.on_tokens_per_second:.1f}",
                f"{r.off_tokens_per_second:.1f}",
                common.milliseconds(r.on_gap_p50_s),
                common.milliseconds(r.off_gap_p50_s),
            ]
            for r in ratios
        ],
    )
    idle = max(run.idle_cpu_share for p in pairs for run in (p.on, p.off))
    megabytes = received["bytes"] / 1e6
    common.console.print(f"The server that was not measured used at most {idle:.1%} of a core.")
    common.console.print(
        f"Traces: {traces['on']}; the drain got {received['messages']} ({megabytes:.0f} MB)."
    )


def main(argv: Sequence[str] | None = None) -> int:
    parser = common.make_parser("capture_cost", __doc__, max_tokens=96)
    parser.add_argument(
        "--home", type=Path, help="the servers' homes are on/ and off/ in it (default: temporary)"
    )
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 8], help="default: 1 8")
    parser.add_argument("--rounds", type=int, default=8, help="default: 8")
    parser.add_argument(
        "--waves",
        type=int,
        default=2,
        metavar="N",
        help="prompts a round, as a multiple of the concurrency (default: 2)",
    )
    args = common.parse(parser, argv)
    chosen = common.prompts_of(args)
    home = args.home or Path(tempfile.mkdtemp(prefix="paceline-capture-"))
    facts = common.machine_facts()
    flags = {"on": "--capture", "off": "--no-capture"}
    drain = DrainProcess(Path(tempfile.mkdtemp(prefix="paceline-drain-")))
    servers = {
        name: ServerProcess(
            home / name,
            common.serve_flags(args, "--learner", drain.base, flag),
            start_deadline_s=args.start_deadline,
        )
        for name, flag in flags.items()
    }
    common.console.print("logs: " + ", ".join(str(s.log) for s in servers.values()))
    with drain, servers["on"], servers["off"]:
        before = {name: server.status()["traces"] for name, server in servers.items()}
        pairs = measure(args, servers, chosen.prompts)
        time.sleep(2 * SETTLE_S)  # the worker reports its counters once a second
        traces = {name: server.status()["traces"] for name, server in servers.items()}
    check_capture(before, traces, drain.counts["messages"])
    ratios = [ratio_of(concurrency, pairs) for concurrency in args.concurrency]
    print_report(ratios, pairs, traces, drain.counts)
    common.write_json(
        args.json,
        common.report("capture_cost", facts, args, chosen)
        | {
            "flags": {name: server.flags for name, server in servers.items()},
            "ratios": ratios,
            "pairs": [{**msgspec.to_builtins(p), "ratio": p.ratio} for p in pairs],
            "traces": traces,
            "drained": drain.counts,
        },
    )
    return 0


if __name__ == "__main__":
    common.run_main(main)
