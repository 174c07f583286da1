"""A burst of load, 1 -> N -> 1 requests at a time, on servers that differ only in speculation.

The servers are adaptive, off, and fixed at 1 to K drafts, with one frozen drafter and no learner. All
are up for the whole run; each phase's requests go to one after the other, in an order that changes,
and a round has new prompts. Answers go on to --max-tokens, so that every server has the same to do.
Adaptive is compared with the server that was fastest in the phase among the others, chosen
afterwards. In the first round adaptive has never seen a batch of that size.

The JSON holds, beside the head that every benchmark's has:
  phases   of each phase: tokens/s of each server over all rounds (with a bootstrap interval over
           rounds), best_fixed, and adaptive over it on the same requests
  changes  of each round, for the begin of the burst and of what follows: levels in drafts per step,
           and within which steps of one request the new one was reached (clients/bench/drafting.py);
           engine_steps_*: the same divided by the requests at a time
  samples  one for each round, phase and server (clients/bench/samples.py)
  traces   the counters read meanwhile, which the changes come from
  flags    of each server
"""

from __future__ import annotations

import argparse
import asyncio
import math
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import psutil

from clients.bench import common
from clients.bench.burst_figures import (
    ADAPTIVE,
    OFF,
    PHASES,
    PhaseChange,
    PhaseFigures,
    Trace,
    phase_changes,
    phase_figures,
    plan_blocks,
)
from clients.bench.drafting import Mark, mark_of
from clients.bench.figures import Interval
from clients.bench.modes import target_folder
from clients.bench.plan import Block
from clients.bench.runner import warm_up
from clients.bench.samples import Sample, make_sample
from clients.load import LoadOptions, RequestRecord, make_client, run_load, served_model
from clients.process import ServerProcess
from clients.summary import acceptance

REPORT_S = 1.3
"""A server's counters are this old at most; they are waited for before and after each measurement."""

KV_CACHE_GIB = "0.5"
"""Of each server, unless the caller's own flags say otherwise: all of them are up at once."""

ROOM = 1.1
"""Memory that must be free for a further server, as a multiple of what the one before took."""


def make_server(args: argparse.Namespace, mode: str, home: Path, target: Path) -> ServerProcess:
    """A mode that is a number is fixed at so many drafts."""
    own = argparse.Namespace(**vars(args) | {"target": str(target)})
    speculation = mode
    if mode.isdigit():
        own.speculative_tokens, speculation = int(mode), "fixed"
    flags = common.serve_flags(
        own, "--speculation", speculation, "--learner", "off", "--kv-cache-gib", KV_CACHE_GIB
    )
    return ServerProcess(home / mode, flags, start_deadline_s=args.start_deadline)


def start_all(servers: Mapping[str, ServerProcess], stack: ExitStack) -> None:
    """Raises BenchError when the next one would not fit into memory."""
    taken = 0
    for mode, server in servers.items():
        free = psutil.virtual_memory().available
        if free < ROOM * taken:
            raise common.BenchError(
                f"no room for the server {mode}: the one before took {taken / 2**30:.1f} GiB, "
                f"{free / 2**30:.1f} GiB are free; choose fewer with --modes"
            )
        stack.enter_context(server)
        taken = max(0, free - psutil.virtual_memory().available)
        asyncio.run(warm_up(server))
        common.console.print(f"{mode} serves after {server.start_seconds:.0f} s; {server.log}")


async def run_block(
    args: argparse.Namespace, server: ServerProcess, block: Block
) -> tuple[list[RequestRecord], list[Mark]]:
    marks: list[Mark] = []
    async with (
        make_client(server.openai_url) as client,
        httpx.AsyncClient(base_url=server.openai_url, trust_env=False, timeout=30) as http,
    ):

        async def read() -> None:
            response = await http.get("/paceline/status")
            marks.append(mark_of(response.raise_for_status().json()))

        async def poll() -> None:
            while True:
                await asyncio.sleep(args.poll)
                await read()

        options = LoadOptions(
            model=await served_model(client),
            concurrency=block.concurrency,
            max_tokens=args.max_tokens,
            temperature=args.temperature,
            top_p=args.top_p,
            seed=args.seed if args.temperature > 0 else None,
            deadline_s=args.deadline,
            ignore_eos=True,
        )
        await asyncio.sleep(REPORT_S)
        await read()
        load = asyncio.create_task(run_load(client, block.prompts, options))
        polling = asyncio.create_task(poll())
        try:
            await asyncio.wait({load, polling}, return_when=asyncio.FIRST_COMPLETED)
            if polling.done():
                await polling  # it never ends by itself: a reading failed
        finally:
            polling.cancel()
            if not load.done():
                load.cancel()
            await asyncio.gather(load, polling, return_exceptions=True)
        await asyncio.sleep(REPORT_S)
        await read()
    records = load.result().records
    failed = [record for record in records if record.error]
    if failed:
        raise common.BenchError(
            f"{len(failed)} of {len(block.prompts)} requests failed; the first: {failed[0].error}"
        )
    return records, marks


def measure(
    args: argparse.Namespace, servers: Mapping[str, ServerProcess], blocks: Sequence[Block]
) -> tuple[list[Sample], list[Trace]]:
    samples: list[Sample] = []
    traces: list[Trace] = []
    tokens = 0
    for block in blocks:
        for mode in block.modes:
            others = [server for name, server in servers.items() if name != mode]
            used = sum(server.cpu_seconds() for server in others)
            records, marks = asyncio.run(run_block(args, servers[mode], block))
            used = sum(server.cpu_seconds() for server in others) - used
            tokens += sum(record.output_tokens or 0 for record in records)
            seconds = max(r.ended for r in records) + 2 * REPORT_S
            sample = make_sample(
                block, mode, records, acceptance(records),
                lead_tokens=tokens, others_cpu_share=used / seconds,
            )  # fmt: skip
            samples.append(sample)
            traces.append(Trace(block.number // len(PHASES), block.phase, mode, marks))
            common.console.print(
                f"block {block.number + 1}/{len(blocks)} {block.phase}, {mode}: "
                f"{sample.tokens_per_second:.1f} tokens/s, "
                f"{len(marks)} readings"
            )
    return samples, traces


def print_report(
    phases: Sequence[PhaseFigures], changes: Sequence[PhaseChange], modes: Sequence[str]
) -> None:
    def bounds(value: Interval | None) -> str:
        if value is None:
            return "-"
        low_high = "" if value.low is None else f" ({value.low:.3f} - {value.high:.3f})"
        return f"{value.value:.3f}{low_high}"

    common.print_table(
        "Tokens/s by phase; numbers are fixed drafts a step",
        ["phase", "at a time", *modes, "best fixed", "adaptive over it"],
        [
            [
                p.phase,
                p.concurrency,
                *(f"{p.tokens_per_second[m].value:.1f}" for m in modes),
                p.best_fixed,
                bounds(p.adaptive_over_best),
            ]
            for p in phases
        ],
    )
    common.print_table(
        "Adaptive after a change of load: engine steps until drafting has followed",
        ["phase", "round", "drafts a step before", "now", "reached after more than", "at most"],
        [
            [c.phase, c.round + 1, c.change.old, c.change.new, *reached(c)]
            for c in changes
        ],
    )  # fmt: skip


def reached(found: PhaseChange) -> tuple[str, str]:
    if not found.change.changed:
        return "no change", "no change"
    if found.engine_steps_earliest is None or found.engine_steps_latest is None:
        return "not reached", "not reached"
    return f"{found.engine_steps_earliest:.0f}", f"{found.engine_steps_latest:.0f}"


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = common.make_parser("burst", __doc__, max_tokens=96)
    parser.set_defaults(draft="auto")
    add = parser.add_argument
    add("--burst", type=int, default=32, metavar="N", help="requests at a time (default: 32)")
    add("--rounds", type=int, default=2, help="default: 2")
    add("--alone", type=int, default=12, metavar="N", help="requests before, and after; default 12")
    add("--waves", type=int, default=2, help="requests of a burst, over N (default: 2)")
    add("--poll", type=float, default=0.5, metavar="S", help="between status readings; default 0.5")
    add("--modes", nargs="+", metavar="MODE", help="adaptive, off, 1 ... K (default: all)")
    add("--home", type=Path, help="new folder for the servers' homes (default: a temporary one)")
    args = common.parse(parser, argv)
    for name in ("rounds", "alone", "waves", "poll", "max_tokens", "speculative_tokens"):
        value = vars(args)[name]
        if not (value > 0 and math.isfinite(value)):
            parser.error(f"--{name.replace('_', '-')} must be above 0")
    if args.burst < 2:
        parser.error("--burst must be above 1")
    known = [ADAPTIVE, OFF, *(str(k) for k in range(1, args.speculative_tokens + 1))]
    args.modes = args.modes or known
    if not set(args.modes) <= set(known) or len(set(args.modes)) < len(args.modes):
        parser.error(f"--modes: choose among {', '.join(known)}, each once")
    if args.home is not None and args.home.exists():
        parser.error(f"--home {args.home} is there already; give a new folder")
    return args


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    chosen = common.prompts_of(args)
    blocks = plan_blocks(
        chosen.prompts, args.modes,
        rounds=args.rounds, alone=args.alone, burst=args.burst, waves=args.waves,
    )  # fmt: skip
    facts = common.machine_facts()
    home = args.home or Path(tempfile.mkdtemp(prefix="paceline-burst-"))
    target = target_folder(args.target, home / "target")
    servers = {mode: make_server(args, mode, home, target) for mode in args.modes}
    with ExitStack() as stack:
        start_all(servers, stack)
        samples, traces = measure(args, servers, blocks)
    phases = [phase_figures(samples, phase, args.modes) for phase in PHASES]
    changes = phase_changes(traces, args.burst)
    print_report(phases, changes, args.modes)
    details: dict[str, Any] = {
        "phases": phases,
        "changes": changes,
        "samples": samples,
        "traces": traces,
        "flags": {mode: server.flags for mode, server in servers.items()},
    }
    common.write_json(args.json, common.report("burst", facts, args, chosen) | details)
    return 0


if __name__ == "__main__":
    common.run_main(main)
