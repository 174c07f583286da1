"""Make a drafter from nothing but its target: ``python -m clients.selfplay.drafter --out FOLDER``.

Starts servers with recorders, has the target write prompts and answer them (see ``generate``), and
trains a drafter from the recordings with ``paceline learn --replay``. Recordings and prompts stay in
the work folder, and a recording that is there already is not made again; ``--recording`` trains from
given ones.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from clients.process import console_script
from clients.selfplay.recorded import default_servers, divide, record, usable_cores
from clients.selfplay.template import SelfPlayError


def learn_command(args: argparse.Namespace, recordings: Sequence[Path]) -> list[str]:
    words = [str(console_script()), "learn"]
    for recording in recordings:
        words += ["--replay", str(recording)]
    # The first server's home: an embedded target is there already.
    return [
        *words, "--out", str(args.out), "--home", str(args.work / "home-0"),
        "--target", args.target,
        "--draft-vocab", str(args.draft_vocab), "--batch-tokens", str(args.batch_tokens),
        "--play-ratio", str(args.passes / 2), "--replay-ratio", str(args.passes),
        "--replay-gib", "14", "--heldout-share", "0.03", "--publish-interval-s", "240",
        "--seed", str(args.seed), "--nice", "0",
    ]  # fmt: skip


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m clients.selfplay.drafter", description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="the drafter's folder; is made")
    parser.add_argument(
        "--work", type=Path, required=True, help="recordings, prompts, home folders"
    )
    parser.add_argument("--target", default="embedded")
    parser.add_argument(
        "--recording", type=Path, nargs="+", default=[], metavar="FILE",
        help="train from these, and make none",
    )  # fmt: skip
    parser.add_argument(
        "--servers", type=int, default=default_servers(), metavar="N",
        help="that serve at a time, the cores divided among them (default here: %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--tokens", type=int, default=1_100_000, help="answer tokens to learn from, of all servers"
    )
    parser.add_argument(
        "--passes", type=float, default=1.0,
        help="times each token is trained on; in the second half the learning rate falls to nothing",
    )  # fmt: skip
    parser.add_argument("--draft-vocab", type=int, default=8192)
    parser.add_argument("--batch-tokens", type=int, default=512)
    parser.add_argument("--concurrency", type=int, default=40, help="requests at a time, a server")
    parser.add_argument("--seed", type=int, default=0, help="server I has the seed SEED + I")
    parser.add_argument(
        "--avoid", type=Path, nargs="*", default=[], metavar="FILE.jsonl",
        help="workload files whose prompts are never sent",
    )  # fmt: skip
    args = parser.parse_args(argv)
    for name in ("servers", "tokens", "passes", "concurrency"):
        if not vars(args)[name] > 0:
            parser.error(f"--{name} must be above 0")
    if args.servers > len(usable_cores()):
        parser.error(f"--servers {args.servers}: there are {len(usable_cores())} cores")
    if args.out.exists():
        parser.error(f"{args.out} exists; give --out a new folder")
    for path in args.recording:
        if not path.is_file():
            parser.error(f"there is no recording {path}")
    return args


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    recordings: list[Path] = args.recording
    if not recordings:
        args.work.mkdir(parents=True, exist_ok=True)
        parts = divide(args.work, args.servers, args.tokens, args.seed, usable_cores())
        try:
            record(parts, args.target, args.concurrency, args.avoid)
        except SelfPlayError as error:
            print(f"error: {error}", file=sys.stderr)
            return 2
        recordings = [part.recording for part in parts]
    return subprocess.run(learn_command(args, recordings), check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
