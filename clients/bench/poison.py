"""One tenant floods a learning server with nonsense: what do the others' drafts suffer?

Every workload file is an honest tenant, one request at a time. In the middle of three windows another
tenant sends random words at ten times their rate together, sampled hot, so that the answers are
nonsense too. Reported is each honest tenant's acceptance length before, during and after, on prompts
that were never sent before.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from clients.bench import common
from clients.bench.day0 import poll_status
from clients.bench.day0_curve import Poll, version_changes
from clients.load import LoadOptions, RequestRecord, make_client, run_load, served_model
from clients.process import ServerProcess
from clients.summary import acceptance, length_interval
from clients.workload import Prompt, WorkloadError, load_prompts

POISON = "poison"
TIMES = 10
"""Nonsense requests at a time, for each honest tenant's one."""

WINDOWS = ("before", "during", "after")
LETTERS = "abcdefghijklmnopqrstuvwxyz"


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
) -> tuple[dict[str, list[RequestRecord]], list[float], list[Poll]]:
    """(records by tenant, when the windows ended, status readings)"""
    lengths = (args.before, args.during, args.after)
    ends = [60.0 * sum(lengths[: i + 1]) for i in range(3)]
    origin = time.perf_counter()
    polls: list[Poll] = []
    records: dict[str, list[RequestRecord]] = {}
    async with make_client(f"{url}/v1") as client:
        polling = asyncio.create_task(poll_status(url, origin, args.poll, polls))
        model = await served_model(client)

        async def send(tenant: str, prompts: Any, until: float, **options: Any) -> None:
            result = await run_load(
                client,
                prompts,
                LoadOptions(
                    model=model, max_tokens=args.max_tokens, deadline_s=args.deadline,
                    tenant=tenant, **options,
                ),
                origin=origin,
                until=until,
            )  # fmt: skip
            records[tenant] = result.records

        async def poison() -> None:
            await asyncio.sleep(max(0.0, ends[0] - (time.perf_counter() - origin)))
            await send(
                POISON, nonsense(args.seed), ends[1],
                concurrency=TIMES * len(traffic), temperature=1.8,
            )  # fmt: skip

        async with asyncio.TaskGroup() as group:
            for tenant, prompts in traffic.items():
                group.create_task(
                    send(tenant, prompts, ends[2], concurrency=1, temperature=args.temperature)
                )
            group.create_task(poison())
        polling.cancel()
        await asyncio.gather(polling, return_exceptions=True)
    return records, ends, polls


def windows(records: Sequence[RequestRecord], ends: Sequence[float]) -> dict[str, Any]:
    """Acceptance length of the requests that began within each window, with its interval."""
    result = {}
    for name, begin, end in zip(WINDOWS, (0.0, *ends), ends, strict=False):
        part = [r for r in records if begin <= r.started < end and not r.error]
        result[name] = {
            "requests": len(part),
            "acceptance_length": acceptance(part).length,
            "interval": length_interval(part),
        }
    return result


def main(argv: Sequence[str] | None = None) -> int:
    parser = common.make_parser("poison", __doc__, max_tokens=96)
    parser.add_argument("--home", type=Path, help="an empty or new folder (default: temporary)")
    for name, minutes in (("before", 5.0), ("during", 6.0), ("after", 5.0)):
        parser.add_argument(
            f"--{name}", type=float, default=minutes, metavar="MINUTES", help=f"default: {minutes}"
        )
    parser.add_argument("--poll", type=float, default=5.0, metavar="S")
    args = common.parse(parser, argv)
    try:
        traffic = {p.stem: load_prompts([p], args.seed).prompts for p in args.workload}
    except WorkloadError as error:
        raise common.BenchError(str(error)) from None
    home = args.home or Path(tempfile.mkdtemp(prefix="paceline-poison-")) / "home"
    facts = common.machine_facts()
    flags = common.serve_flags(args, "--learner", "local")
    with ServerProcess(home, flags, start_deadline_s=args.start_deadline) as server:
        records, ends, polls = asyncio.run(measure(args, server.url, traffic))
        last = server.status()
        history = server.get("/v1/paceline/history").json()["changes"]
    found = {tenant: windows(part, ends) for tenant, part in records.items() if tenant != POISON}
    common.print_table(
        "Acceptance length of the honest tenants",
        ["tenant", *(f"{w} ({what})" for w in WINDOWS for what in ("n", "length", "95 %"))],
        [
            [
                tenant,
                *(
                    value
                    for w in WINDOWS
                    for value in (
                        figures[w]["requests"],
                        figures[w]["acceptance_length"],
                        " - ".join(f"{x:.2f}" for x in figures[w]["interval"] or ()),
                    )
                ),
            ]
            for tenant, figures in found.items()
        ],
    )
    nonsense_sent = records.get(POISON, [])
    common.console.print(
        f"{len(nonsense_sent)} nonsense requests; learner refused {last['learner']['rejected']}; "
        f"{len(history)} changes of version, {last['rollbacks']['count']} rollbacks"
    )
    common.write_json(
        args.json,
        {
            "benchmark": "poison",
            "machine": facts,
            "options": common.options_of(args),
            "flags": server.flags,
            "window_ends_s": ends,
            "tenants": found,
            "nonsense_requests": len(nonsense_sent),
            "nonsense_tokens": sum(r.output_tokens or 0 for r in nonsense_sent),
            "changes": version_changes(polls),
            "history": history,
            "last_status": last,
            "records": {t: part for t, part in records.items() if t != POISON},
        },
    )
    return 1 if any(r.error for part in records.values() for r in part) else 0


if __name__ == "__main__":
    common.run_main(main)
