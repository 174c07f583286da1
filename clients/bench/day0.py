"""Day 0: a server with an empty home learns its drafter from the requests it serves.

Every prompt is sent once, so each request's acceptance is on a prompt never sent before. When the
prompts run out, sending stops. With --reserve N, the last N prompts are kept back and sent after
--minutes.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx

from clients.bench import common
from clients.bench.day0_curve import Final, Point, Poll, curve, final_window, version_changes
from clients.bench.day0_plot import plot
from clients.load import LoadOptions, LoadResult, make_client, run_load, served_model
from clients.load import RequestRecord as Record
from clients.process import ServerProcess
from clients.summary import LoadSummary, acceptance, summarize


async def poll_status(url: str, origin: float, every: float, polls: list[Poll]) -> None:
    """Until cancelled. A failed poll is a poll with an error."""
    async with httpx.AsyncClient(base_url=url, trust_env=False, timeout=30) as http:
        while True:
            try:
                response = await http.get("/v1/paceline/status")
                response.raise_for_status()
                body = response.json()
                polls.append(
                    Poll(
                        time=time.perf_counter() - origin,
                        live=body["draft"]["live"],
                        learner=body["learner"],
                        traces=body["traces"],
                        swaps=body["swaps"],
                    )
                )
            except (httpx.HTTPError, ValueError, KeyError) as error:
                polls.append(
                    Poll(time.perf_counter() - origin, error=f"{type(error).__name__}: {error}")
                )
            await asyncio.sleep(every)


async def measure(
    args: argparse.Namespace, url: str, prompts: Sequence[Any]
) -> tuple[list[LoadResult], list[Poll]]:
    traffic = prompts[: len(prompts) - args.reserve]
    reserve = prompts[len(prompts) - args.reserve :]
    async with make_client(f"{url}/v1") as client:
        options = LoadOptions(
            model=await served_model(client),
            concurrency=args.concurrency,
            max_tokens=args.max_tokens,
            temperature=args.temperature,
            top_p=args.top_p,
            deadline_s=args.deadline,
            multi_turn=args.multi_turn,
        )
        origin = time.perf_counter()
        polls: list[Poll] = []
        polling = asyncio.create_task(poll_status(url, origin, args.poll, polls))
        end = args.minutes * 60

        def progress(record: Record) -> None:
            done = len(polls) and polls[-1]
            state = f"v{done.live} {done.learner.get('phase', '')}" if done else ""
            length = acceptance([record]).length
            shown = "nothing drafted" if length is None else f"length {length:.2f}"
            outcome = (
                f"FAILED {record.error}"
                if record.error
                else f"{record.output_tokens} tokens, {shown}"
            )
            common.console.print(
                f"{record.ended / 60:6.1f} min  {state:<16} {record.prompt_id}: {outcome}"
            )

        results = [
            await run_load(client, traffic, options, origin=origin, until=end, on_record=progress)
        ]
        if reserve and results[0].ended_by != "errors":
            rest = end - (time.perf_counter() - origin)
            if rest > 0:
                common.console.print(
                    f"no prompts left; the last {len(reserve)} are sent in {rest / 60:.1f} min"
                )
                await asyncio.sleep(rest)
            results.append(
                await run_load(client, reserve, options, origin=origin, on_record=progress)
            )
        await asyncio.sleep(args.poll + 1)  # one more reading after the last request
        polling.cancel()
        await asyncio.gather(polling, return_exceptions=True)
    return results, polls


def print_report(
    points: Sequence[Point], final: Final | None, summary: LoadSummary, window: int, rows: int
) -> None:
    step = max(1, len(points) // rows)
    chosen = [*points[step - 1 :: step]]
    if points and points[-1] is not chosen[-1]:
        chosen.append(points[-1])
    common.print_table(
        f"Day 0: lengths over the last {window} requests",
        [
            "minutes",
            "live",
            "requests",
            "tokens served",
            "trained tokens",
            "acceptance length",
            "tokens per target step",
            "tokens/s",
        ],
        [
            [
                f"{p.time / 60:.1f}",
                f"v{p.live}",
                p.requests,
                p.tokens_served,
                p.learner_tokens,
                p.acceptance_length,
                p.tokens_per_step,
                f"{p.tokens_per_second:.1f}",
            ]
            for p in chosen
        ],
    )
    common.print_table(
        "By draft version, all requests",
        ["version", "steps drafted", "plain steps", "acceptance length", "rates by position"],
        [
            [
                f"v{c.version}",
                c.steps,
                c.plain_steps,
                c.length,
                " ".join(f"{r:.3f}" for r in c.rates),
            ]
            for c in summary.acceptance
        ],
    )
    print_line = common.console.print
    print_line(
        f"requests {summary.requests}, failed {summary.failed}, "
        f"{summary.tokens_per_second:.1f} tokens/s"
    )
    if final is None:
        print_line("Nothing was promoted.")
    elif final.acceptance_length is None:
        print_line(f"v{final.version} came last; no request drafted with it alone.")
    else:
        common.console.print(
            f"Final: acceptance length {final.acceptance_length:.3f} with v{final.version}, "
            f"on the last {final.requests} requests begun after it went live, never sent before "
            f"(all {final.all_requests} such requests: {final.all_acceptance_length:.3f}).",
            style="bold",
        )


def arguments() -> argparse.ArgumentParser:
    parser = common.make_parser("day0", __doc__, max_tokens=128)
    parser.add_argument("--plot", type=Path, metavar="FILE.png")
    parser.add_argument(
        "--home", type=Path, help="an empty or new folder (default: a temporary one)"
    )
    parser.add_argument("--minutes", type=float, default=20.0, help="default: 20")
    parser.add_argument("--concurrency", type=int, default=2, help="default: 2")
    parser.add_argument(
        "--window", type=int, default=20, metavar="N", help="requests in the window (default: 20)"
    )
    parser.add_argument(
        "--reserve",
        type=int,
        default=0,
        metavar="N",
        help="prompts sent after --minutes (default: 0)",
    )
    parser.add_argument(
        "--multi-turn", action="store_true", help="ask later turns too, with the answers so far"
    )
    parser.add_argument(
        "--poll", type=float, default=5.0, metavar="S", help="between status readings (default: 5)"
    )
    parser.add_argument(
        "--goal", type=float, metavar="LENGTH", help="draw a line at this acceptance length"
    )
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    args = common.parse(arguments(), argv)
    chosen = common.prompts_of(args)
    if args.reserve >= len(chosen.prompts):
        raise common.BenchError(
            f"--reserve {args.reserve} leaves nothing of {len(chosen.prompts)} prompts"
        )
    if args.home is not None and args.home.exists() and any(args.home.iterdir()):
        raise common.BenchError(f"{args.home} is not empty; day 0 begins with an empty home")
    home = args.home or Path(tempfile.mkdtemp(prefix="paceline-day0-")) / "home"
    facts = common.machine_facts()
    server = ServerProcess(
        home, common.serve_flags(args, "--learner", "local"), start_deadline_s=args.start_deadline
    )
    common.console.print(
        f"{len(chosen.prompts)} prompts ({chosen.duplicates} repeats left out); log: {server.log}"
    )
    with server:
        results, polls = asyncio.run(measure(args, server.url, chosen.prompts))
        last_status = server.status()
    records = [record for result in results for record in result.records]
    changes = version_changes(polls)
    points = curve(records, polls, args.window)
    final = final_window(records, changes, args.window)
    summary = summarize(records)
    print_report(points, final, summary, args.window, rows=20)
    common.write_json(
        args.json,
        common.report("day0", facts, args, chosen)
        | {
            "flags": server.flags,
            "start_seconds": server.start_seconds,
            "ended_by": [r.ended_by for r in results],
            "final": final,
            "summary": summary,
            "changes": changes,
            "curve": points,
            "polls": polls,
            "records": records,
            "last_status": last_status,
        },
    )
    if args.plot is not None:
        names = ", ".join(path.stem for path in args.workload)
        plot(
            args.plot,
            points,
            changes,
            goal=args.goal,
            window=args.window,
            subtitle=f"{args.target}, K = {args.speculative_tokens}, "
            f"concurrency {args.concurrency}; {names}; each prompt sent once; "
            f"{facts['cores']} cores, {facts['cpu']}",
        )
        common.console.print(f"written: {args.plot}")
    return 1 if summary.failed else 0


if __name__ == "__main__":
    common.run_main(main)
