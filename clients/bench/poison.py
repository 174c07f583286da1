"""One tenant floods a learning server with nonsense: what do the others' drafts suffer?

Every workload file is an honest tenant, one request at a time. In the middle of three windows another
tenant sends random words at ten times their rate together, sampled hot, so that the answers are
nonsense too. Reported is each honest tenant's acceptance length before, during and after, on prompts
that were never sent before.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import random
import re
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from clients.bench import common
from clients.bench.day0 import poll_status
from clients.bench.day0_curve import Poll, version_changes
from clients.bench.phases import PhaseSpec, free_name, load_phases
from clients.load import LoadOptions, LoadResult, make_client, run_load, served_model
from clients.load import RequestRecord as Record
from clients.process import ServerProcess
from clients.summary import acceptance, length_interval, served
from clients.workload import Prompt

POISON = "poison"
TIMES = 10
"""Nonsense requests at a time, for each honest tenant's one."""

POISON_TEMPERATURE = 1.8
LONGEST_NAME = 56
"""Characters; the server takes 64, and a name in use gets a number."""

WINDOWS = ("before", "during", "after")
LETTERS = "abcdefghijklmnopqrstuvwxyz"


def tenants(files: Sequence[Path]) -> list[PhaseSpec]:
    """Each file under a name that the server takes for a tenant, and that no other tenant has."""
    specs: list[PhaseSpec] = []
    for path in files:
        stem = re.sub(r"[^A-Za-z0-9._@-]", "-", path.stem)[:LONGEST_NAME]
        specs.append(PhaseSpec(free_name(stem, {POISON, *(s.name for s in specs)}), (path,)))
    return specs


def nonsense(seed: int) -> Iterator[Prompt]:
    """Prompts without end, none like another."""
    draw = random.Random(seed)
    number = 0
    while True:
        words = ("".join(draw.choices(LETTERS, k=draw.randint(1, 12))) for _ in range(40))
        yield Prompt(id=f"nonsense-{number}", turns=(" ".join(words),))
        number += 1


async def measure(
    args: argparse.Namespace, url: str, traffic: Mapping[str, Sequence[Prompt]]
) -> tuple[dict[str, LoadResult], list[Poll]]:
    """(what became of each tenant's requests, status readings)"""
    origin = time.perf_counter()
    begin, end, last = window_ends(args)
    polls: list[Poll] = []
    results: dict[str, LoadResult] = {}
    async with make_client(f"{url}/v1") as client:
        model = await served_model(client)

        async def send(
            tenant: str,
            prompts: Iterable[Prompt],
            until: float,
            *,
            concurrency: int = 1,
            temperature: float = args.temperature,
        ) -> None:
            options = LoadOptions(
                model=model,
                concurrency=concurrency,
                max_tokens=args.max_tokens,
                temperature=temperature,
                top_p=args.top_p,
                deadline_s=args.deadline,
                tenant=tenant,
            )
            results[tenant] = await run_load(client, prompts, options, origin=origin, until=until)

        async def poison() -> None:
            await asyncio.sleep(begin - (time.perf_counter() - origin))
            many = TIMES * len(traffic)
            await send(
                POISON, nonsense(args.seed), end, concurrency=many, temperature=POISON_TEMPERATURE
            )

        polling = asyncio.create_task(poll_status(url, origin, args.poll, polls))
        try:
            async with asyncio.TaskGroup() as group:
                for tenant, prompts in traffic.items():
                    group.create_task(send(tenant, prompts, last))
                group.create_task(poison())
        finally:
            polling.cancel()
            with suppress(asyncio.CancelledError):
                await polling
    return results, polls


def window_ends(args: argparse.Namespace) -> list[float]:
    """Seconds after the first request."""
    lengths = (args.before, args.during, args.after)
    return [60.0 * sum(lengths[: i + 1]) for i in range(3)]


def windows(records: Sequence[Record], ends: Sequence[float]) -> dict[str, dict[str, Any]]:
    """Acceptance length of the requests that began within each window, with its interval."""
    result = {}
    for name, begin, end in zip(WINDOWS, (0.0, *ends[:-1]), ends, strict=True):
        part = served(r for r in records if begin <= r.started < end)
        result[name] = {
            "requests": len(part),
            "acceptance_length": acceptance(part).length,
            "interval": length_interval(part),
        }
    return result


def arguments() -> argparse.ArgumentParser:
    parser = common.make_parser("poison", __doc__, max_tokens=96)
    parser.set_defaults(draft="auto")
    parser.add_argument(
        "--home", type=Path, help="an empty or new folder (default: a temporary one)"
    )
    for name, minutes in (("before", 5.0), ("during", 6.0), ("after", 5.0)):
        parser.add_argument(
            f"--{name}", type=float, default=minutes, metavar="MINUTES", help="default: %(default)s"
        )
    parser.add_argument(
        "--poll", type=float, default=5.0, metavar="S", help="between status readings (default: 5)"
    )
    return parser


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = arguments()
    args = common.parse(parser, argv)
    for name in ("before", "during", "after", "poll", "max_tokens", "deadline"):
        value = vars(args)[name]
        if not (value > 0 and math.isfinite(value)):
            parser.error(f"--{name.replace('_', '-')} must be above 0")
    if args.home is not None and args.home.exists():
        if not args.home.is_dir():
            parser.error(f"{args.home} is no folder")
        if any(args.home.iterdir()):
            parser.error(f"{args.home} is not empty; what it has learned would be measured too")
    return args


def show(
    found: Mapping[str, Mapping[str, Mapping[str, Any]]],
    results: Mapping[str, LoadResult],
    status: Mapping[str, Any],
    changes: int,
) -> None:
    def cells(window: Mapping[str, Any]) -> list[Any]:
        interval = window["interval"]
        between = None if interval is None else f"{interval[0]:.2f} - {interval[1]:.2f}"
        return [window["requests"], window["acceptance_length"], between]

    common.print_table(
        "Acceptance length of the honest tenants",
        ["tenant", *(f"{w} ({what})" for w in WINDOWS for what in ("n", "length", "95 %"))],
        [
            [tenant, *(cell for w in WINDOWS for cell in cells(figures[w]))]
            for tenant, figures in found.items()
        ],
    )
    for tenant, result in results.items():
        failed = len(result.records) - len(served(result.records))
        if result.ended_by != "time":
            common.console.print(
                f"{tenant} ended early, after {result.ended / 60:.1f} min: {result.ended_by}"
            )
        if failed:
            common.console.print(f"{tenant}: {failed} requests failed")
    common.console.print(
        f"{len(results[POISON].records)} nonsense requests; learner refused "
        f"{status['learner'].get('rejected', {})}; {changes} changes of version, "
        f"{status['rollbacks']['count']} rollbacks"
    )


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    phases = load_phases(tenants(args.workload), args.seed)
    traffic = {phase.name: phase.prompts for phase in phases}
    home = args.home or Path(tempfile.mkdtemp(prefix="paceline-poison-")) / "home"
    facts = common.machine_facts()
    flags = common.serve_flags(args, "--learner", "local")
    server = ServerProcess(home, flags, start_deadline_s=args.start_deadline)
    common.console.print(f"tenants: {', '.join(traffic)}; log: {server.log}")
    with server:
        results, polls = asyncio.run(measure(args, server.url, traffic))
        status = server.status()
        history = server.get("/v1/paceline/history").json()["changes"]
    honest = {tenant: results[tenant].records for tenant in traffic}
    ends = window_ends(args)
    found = {tenant: windows(records, ends) for tenant, records in honest.items()}
    show(found, results, status, len(history))
    poison = results[POISON].records
    common.write_json(
        args.json,
        {
            "benchmark": "poison",
            "machine": facts,
            "options": common.options_of(args),
            "flags": server.flags,
            "window_ends_s": ends,
            "ended_by": {tenant: result.ended_by for tenant, result in results.items()},
            "tenants": found,
            "nonsense_requests": len(poison),
            "nonsense_failed": len(poison) - len(served(poison)),
            "nonsense_tokens": sum(r.output_tokens or 0 for r in served(poison)),
            "changes": version_changes(polls),
            "history": history,
            "last_status": status,
            "records": honest,
        },
    )
    return 1 if any(r.error for records in honest.values() for r in records) else 0


if __name__ == "__main__":
    common.run_main(main)
