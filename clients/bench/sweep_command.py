"""Compare servers by concurrency, on the same requests: tokens/s, latency and acceptance.

The levels of --concurrency are visited in their order and back again, --rounds times. Each visit has
prompts of its own, drawn from all files, and sends them to one mode's server after the other's, in
changing order. No prompt is sent twice to a server.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from clients.bench import common, options
from clients.bench.modes import chosen_modes
from clients.bench.phases import PhaseSpec, load_phases
from clients.bench.session import carry_out
from clients.bench.sweep_plan import sweep_plan
from clients.bench.sweep_report import as_json, print_results, results_of

LEVELS = "1,2,4,8,16,32"


def arguments() -> argparse.ArgumentParser:
    parser = options.make_parser("paceline bench sweep", __doc__, "clients/bench/sweep_report.py")
    add = parser.add_argument
    add(
        "--workload",
        type=Path,
        nargs="+",
        required=True,
        metavar="FILE",
        help="JSONL files of prompts, mixed",
    )
    add(
        "--concurrency",
        type=levels_of,
        default=LEVELS,
        metavar="N,...",
        help="requests at a time (default: %(default)s)",
    )
    add(
        "--per-level",
        type=int,
        metavar="N",
        help="prompts each time a level is visited (default: 2 x concurrency, at least 8)",
    )
    add("--rounds", type=int, default=2, metavar="N", help="up and down again (default: 2)")
    # The runner asks for these too; a sweep has its own answers.
    parser.set_defaults(rate=None, burst=None, learner_always=False, quiet_measure=False)
    return parser


def levels_of(text: str) -> list[int]:
    words = text.split(",")
    if not all(word.isdecimal() and int(word) > 0 for word in words):
        raise argparse.ArgumentTypeError(f"{text!r}: write numbers above 0 with commas between")
    levels = [int(word) for word in words]
    if len(set(levels)) < len(levels):
        raise argparse.ArgumentTypeError(f"{text!r}: a level stands in it twice")
    return levels


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = arguments()
    args = options.parse(parser, argv, ("per_level", "rounds"))
    most = max(args.concurrency)
    if most > args.max_num_seqs:
        parser.error(
            f"at concurrency {most} requests would wait: --max-num-seqs {args.max_num_seqs}"
        )
    if args.per_level is not None and args.per_level < most:
        parser.error(f"--per-level {args.per_level} is too few for concurrency {most}")
    return args


def sweep(args: argparse.Namespace) -> int:
    modes, skipped = chosen_modes(args.modes)
    (mix,) = load_phases([PhaseSpec("sweep", tuple(args.workload))], args.seed, args.avoid)
    blocks = sweep_plan(
        mix.prompts, modes, args.concurrency, per_level=args.per_level, rounds=args.rounds
    )
    session = carry_out(args, modes, skipped, blocks)
    runner = session.runner
    results = results_of(modes, runner.samples, runner.records, runner.readings)
    print_results(results, skipped)
    common.write_json(args.json, as_json(args, session, results))
    if args.plot is not None:
        from clients.bench.sweep_plot import plot  # matplotlib is optional and slow to import

        words = (f"K = {args.speculative_tokens}", f"at most {args.max_tokens} tokens")
        plot(args.plot, results, subtitle=session.subtitle(*words))
        common.console.print(f"written: {args.plot}")
    return session.exit_code()
