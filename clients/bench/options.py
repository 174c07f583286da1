"""Options that ``paceline bench`` and ``paceline bench sweep`` share."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from clients.bench import common
from clients.bench.modes import MODES


def make_parser(prog: str, doc: str | None, report: str) -> argparse.ArgumentParser:
    """``report`` is the module that lists the fields of the JSON."""
    parser = argparse.ArgumentParser(
        prog=prog,
        description=doc,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="Flags behind a lone -- go to `paceline serve` (frozen and online), those behind a second\n"
        f"one to vLLM in every server. The fields of the JSON are listed in {report}.\n"
        "Modes:\n" + "\n".join(f"  {name:<15} {what}" for name, what in MODES.items()),
    )
    add = parser.add_argument
    add("--modes", default="none,frozen,online", metavar="MODE,...", help="default: %(default)s")
    add(
        "--draft",
        default="auto",
        metavar="FOLDER",
        help="drafter of frozen and online: 'auto' (default), the one that comes with the package, or "
        "a folder",
    )
    add("--gguf", type=Path, metavar="FILE", help="llama.cpp's model (default: the embedded one's)")
    add("--draft-gguf", type=Path, metavar="FILE", help="llama.cpp's drafter")
    add("--target", default="embedded", help="'embedded' (default) or a model folder")
    add("--max-tokens", type=int, default=128, metavar="N", help="per request (default: 128)")
    add("--temperature", type=float, default=0.0, help="default: 0, greedy")
    add("--top-p", type=float, default=1.0)
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
    add("--plot", type=Path, metavar="FILE.png", help="draw the figures")
    return parser


def parse(
    parser: argparse.ArgumentParser, argv: Sequence[str], above_zero: Sequence[str]
) -> argparse.Namespace:
    """The options; ``serve_flags`` and ``engine_flags`` hold what stood behind the dashes.

    ``above_zero`` names the parser's own numbers that have to be, beside the shared ones.
    """
    args = common.parse(parser, argv)
    words = args.serve_flags
    split = words.index("--") if "--" in words else len(words)
    args.serve_flags, args.engine_flags = words[:split], words[split + 1 :]
    for name in ("max_tokens", "max_num_seqs", "poll", "kv_cache_gib", *above_zero):
        value = vars(args)[name]
        if value is not None and value <= 0:
            parser.error(f"--{name.replace('_', '-')} must be above 0")
    if args.home is not None and args.home.exists() and any(args.home.iterdir()):
        parser.error(f"--home {args.home} is not empty; earlier traffic would be in it")
    if args.plot is not None and find_spec("matplotlib") is None:
        parser.error("--plot needs matplotlib; pip install -e '.[bench]'")
    return args
