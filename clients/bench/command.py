"""Compare servers on the same requests: no speculation, lookup drafting, a frozen drafter, a learning one.

Prompts are sent in small blocks, each block to one mode's server after the other's, in changing order.
The online server gets every block, because it has to see all traffic to learn from it; the figures come
from the last --measure prompts of each phase, which every mode gets. Several phases are a shift of
traffic. No prompt is sent twice.
"""

from __future__ import annotations

import argparse
import signal
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path

import httpx

from clients.bench import common
from clients.bench.modes import (
    MODES,
    check_draft,
    chosen_modes,
    make_server,
    target_folder,
)
from clients.bench.phases import load_phases, parse_phases
from clients.bench.plan import ONLINE, OURS, plan
from clients.bench.report import as_json, print_results, results_of
from clients.bench.runner import Runner
from clients.bench.samples import Sample
from clients.process import ServerFailed

PROMPTS_A_STREAM = 4
"""Of a block, unless --block says otherwise."""


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="paceline bench",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="Flags behind a lone -- go to `paceline serve` (frozen and online), those behind a second\n"
        "one to vLLM in every server. The fields of the JSON are listed in clients/bench/report.py.\n"
        "Modes:\n" + "\n".join(f"  {name:<7} {what}" for name, what in MODES.items()),
    )
    add = parser.add_argument
    add(
        "--phase",
        action="append",
        required=True,
        metavar="[NAME=]FILE[,FILE...][:N]",
        help="JSONL files of prompts, at most N of them; again for a shift. Phases that name the same "
        "file divide its prompts",
    )
    add("--modes", default="none,frozen,online", metavar="MODE,...", help="default: %(default)s")
    add("--draft", default="none", metavar="FOLDER", help="drafter of frozen and online")
    add("--target", default="embedded", help="'embedded' (default) or a model folder")
    add("--concurrency", type=int, default=1, metavar="N", help="requests at a time (default: 1)")
    add("--rate", type=float, metavar="R", help="instead: Poisson arrivals, R requests a second")
    add("--max-tokens", type=int, default=128, metavar="N", help="per request (default: 128)")
    add("--temperature", type=float, default=0.0, help="default: 0, greedy")
    add("--top-p", type=float, default=1.0)
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
    add("--avoid", type=Path, nargs="+", default=[], metavar="FILE", help="prompts never sent")
    add("--speculative-tokens", type=int, default=3, metavar="K", help="default: 3")
    add("--dtype", default="auto", help="default: auto")
    add(
        "--kv-cache-gib",
        type=float,
        default=0.5,
        metavar="GIB",
        help="of each server (default: 0.5)",
    )
    add("--max-num-seqs", type=int, default=32, metavar="N", help="of each server (default: 32)")
    add("--home", type=Path, help="new folder for the servers' homes and logs (default: temporary)")
    add("--seed", type=int, default=0, help="order of the prompts (default: 0)")
    add("--poll", type=float, default=2.0, metavar="S", help="between status readings (default: 2)")
    add("--deadline", type=float, default=300.0, metavar="S", help="of a request (default: 300)")
    add(
        "--start-deadline",
        type=float,
        default=900.0,
        metavar="S",
        help="of a server (default: 900)",
    )
    add("--json", type=Path, metavar="FILE", help="write everything measured here")
    add("--plot", type=Path, metavar="FILE.png", help="lengths and tokens/s over tokens served")
    return parser


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """The options; ``serve_flags`` and ``engine_flags`` hold what stood behind the dashes."""
    parser = arguments()
    args = common.parse(parser, argv)
    words = args.serve_flags
    split = words.index("--") if "--" in words else len(words)
    args.serve_flags, args.engine_flags = words[:split], words[split + 1 :]
    for name in ("concurrency", "max_tokens", "measure", "rate", "poll", "kv_cache_gib", "block"):
        value = vars(args)[name]
        if value is not None and value <= 0:
            parser.error(f"--{name.replace('_', '-')} must be above 0")
    if args.baseline_every < 0:
        parser.error("--baseline-every must not be negative")
    if args.home is not None and args.home.exists() and any(args.home.iterdir()):
        parser.error(f"--home {args.home} is not empty; earlier traffic would be in it")
    if args.plot is not None and find_spec("matplotlib") is None:
        parser.error("--plot needs matplotlib; pip install -e '.[bench]'")
    args.block = args.block or PROMPTS_A_STREAM * args.concurrency
    return args


def bench(args: argparse.Namespace) -> int:
    modes, skipped = chosen_modes(args.modes)
    phases = load_phases(parse_phases(args.phase), args.seed, args.avoid)
    blocks = plan(phases, modes, size=args.block, measure=args.measure, every=args.baseline_every)
    if set(OURS) & set(modes):
        check_draft(args.draft, modes)
    say = common.console.print
    for line in skipped:
        say(line)
    home = args.home or Path(tempfile.mkdtemp(prefix="paceline-bench-"))
    facts = common.machine_facts()
    target = target_folder(args.target, home / "target")
    servers = {mode: make_server(mode, args, home / mode, target) for mode in modes}
    prompts = sum(len(b.prompts) * len(b.modes) for b in blocks)
    say(f"{prompts} requests in {len(blocks)} blocks; logs: {home}/*.log")

    def progress(sample: Sample) -> None:
        length = sample.acceptance_length
        say(
            f"{sample.ended / 60:6.1f} min  block {sample.block + 1}/{len(blocks)} {sample.phase}"
            f"{' (measured)' if sample.measured else ''}  {sample.mode}: "
            f"{sample.tokens_per_second:.1f} tokens/s"
            + ("" if length is None else f", length {length:.2f}")
            + (f", {sample.failed} FAILED" if sample.failed else "")
        )

    runner = Runner(args, servers, progress)
    stopped: str | None = None
    status = None
    with ExitStack() as stack:
        for mode, server in servers.items():
            stack.enter_context(server)
            say(f"{mode} serves after {server.start_seconds:.0f} s")
        try:
            runner.run(blocks)
            status = servers[ONLINE].status() if ONLINE in servers else None
        except (common.BenchError, ServerFailed, httpx.HTTPError, KeyboardInterrupt) as error:
            if not runner.samples:
                raise
            stopped = str(error) or "interrupted"  # hours of measurements are not thrown away
    results = results_of(args, phases, modes, runner.samples, runner.records, runner.readings)
    print_results(args, results, skipped)
    common.write_json(
        args.json,
        as_json(args, facts, servers, skipped, phases, blocks, results, runner)
        | {"final_status": status, "stopped": stopped},
    )
    if args.plot is not None:
        from clients.bench.bench_plot import plot  # matplotlib is optional and slow to import

        arrivals = f"{args.rate:g} requests/s" if args.rate else f"concurrency {args.concurrency}"
        plot(
            args.plot,
            runner.samples,
            results.changes,
            subtitle=f"{target.name}, K = {args.speculative_tokens}, {arrivals}; "
            f"{facts['cores']} cores, {facts['cpu']}",
        )
        say(f"written: {args.plot}")
    if stopped is not None:
        raise common.BenchError(f"stopped after {len(runner.samples)} samples: {stopped}")
    return 1 if any(sample.failed for sample in runner.samples) else 0


def main(argv: Sequence[str] | None = None) -> int:
    # Terminated, it still has servers to stop.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        return bench(parse(sys.argv[1:] if argv is None else argv))
    except (common.BenchError, ServerFailed, FileNotFoundError) as error:
        print(f"paceline: {error}", file=sys.stderr)
        return 2
