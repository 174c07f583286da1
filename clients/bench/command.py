"""Compare servers on the same requests: no speculation, lookup drafting, a frozen drafter, a learning one.

Prompts are sent in small blocks, each block to one mode's server after the other's, in changing order.
The online server gets every block, because it has to see all traffic to learn from it; the figures come
from the last --measure prompts of each phase, which every mode gets. Several phases are a shift of
traffic. No prompt is sent twice.

`paceline bench sweep` compares them by concurrency instead.
"""

from __future__ import annotations

import argparse
import math
import re
import signal
import sys
from collections.abc import Sequence

from clients.bench import common, options, sweep_command
from clients.bench.arrivals import Burst
from clients.bench.modes import chosen_modes
from clients.bench.phases import load_phases, parse_phases
from clients.bench.plan import plan
from clients.bench.report import as_json, print_results, results_of
from clients.bench.session import carry_out
from clients.process import ServerFailed

SWEEP = "sweep"
"""The first word that asks for the other benchmark."""

PROMPTS_A_STREAM = 4
"""Of a block, unless --block says otherwise."""


def arguments() -> argparse.ArgumentParser:
    parser = options.make_parser("paceline bench", __doc__, "clients/bench/report.py")
    add = parser.add_argument
    add(
        "--phase",
        action="append",
        required=True,
        metavar="[NAME=]FILE[,FILE...][:N]",
        help="JSONL files of prompts, at most N of them; again for a shift. Phases that name the same "
        "file divide its prompts",
    )
    add("--concurrency", type=int, default=1, metavar="N", help="requests at a time (default: 1)")
    add(
        "--alone-concurrency",
        type=int,
        metavar="N",
        help="of blocks that only the online server gets, to have it learn sooner (default: the same)",
    )
    add("--rate", type=float, metavar="R", help="instead: Poisson arrivals, R requests a second")
    add(
        "--burst",
        type=burst_of,
        metavar="N:S",
        help="with --rate: besides, N requests at once every S seconds",
    )
    add(
        "--measure",
        type=int,
        default=40,
        metavar="M",
        help="prompts measured a phase (default: 40)",
    )
    add("--block", type=int, metavar="N", help="prompts a block (default: 4 x concurrency)")
    add(
        "--baseline-every",
        type=int,
        default=1,
        metavar="N",
        help="before the measured window, modes other than online get one block in N, none if 0 "
        "(default: 1)",
    )
    add(
        "--quiet-measure",
        action="store_true",
        help="stop the learner in the measured windows, to compare drafting alone",
    )
    add(
        "--learner-always",
        action="store_true",
        help="let the learner run beside the other modes' blocks too",
    )
    add("--goal", type=float, default=1.25, help="ratio whose tokens are counted (default: 1.25)")
    return parser


def burst_of(text: str) -> Burst:
    match = re.fullmatch(r"([1-9]\d*):(\d+(?:\.\d+)?)", text)
    if match is None or float(match[2]) == 0:
        raise argparse.ArgumentTypeError(f"{text!r}: write N:S, N requests every S seconds")
    return Burst(int(match[1]), float(match[2]))


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = arguments()
    args = options.parse(
        parser, argv, ("concurrency", "alone_concurrency", "measure", "rate", "block")
    )
    if args.baseline_every < 0:
        parser.error("--baseline-every must not be negative")
    args.block = args.block or PROMPTS_A_STREAM * args.concurrency
    if args.burst is not None:
        if args.rate is None:
            parser.error("--burst needs --rate")
        period = math.ceil(args.rate * args.burst.every_s) + args.burst.count
        if args.block < period:
            parser.error(f"--block {args.block} ends before its first burst; give {period} or more")
    return args


def bench(args: argparse.Namespace) -> int:
    modes, skipped = chosen_modes(args.modes)
    phases = load_phases(parse_phases(args.phase), args.seed, args.avoid)
    blocks = plan(
        phases,
        modes,
        size=args.block,
        measure=args.measure,
        every=args.baseline_every,
        concurrency=args.concurrency,
        alone_concurrency=args.alone_concurrency,
    )
    session = carry_out(args, modes, skipped, blocks)
    runner = session.runner
    results = results_of(args, phases, modes, runner.samples, runner.records, runner.readings)
    print_results(args, results, skipped)
    common.write_json(args.json, as_json(args, session, phases, results))
    if args.plot is not None:
        from clients.bench.bench_plot import plot  # matplotlib is optional and slow to import

        plot(
            args.plot,
            runner.samples,
            results.changes,
            subtitle=session.subtitle(f"K = {args.speculative_tokens}", arrivals(args)),
        )
        common.console.print(f"written: {args.plot}")
    return session.exit_code()


def arrivals(args: argparse.Namespace) -> str:
    """In words."""
    if args.rate is None:
        return f"concurrency {args.concurrency}"
    burst = args.burst
    more = "" if burst is None else f" and {burst.count} at once every {burst.every_s:g} s"
    return f"{args.rate:g} requests/s{more}"


def main(argv: Sequence[str] | None = None) -> int:
    # Terminated, it still has servers to stop.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    words = sys.argv[1:] if argv is None else argv
    try:
        if words[:1] == [SWEEP]:
            return sweep_command.sweep(sweep_command.parse(words[1:]))
        return bench(parse(words))
    except (common.BenchError, ServerFailed, FileNotFoundError) as error:
        print(f"paceline: {error}", file=sys.stderr)
        return 2
