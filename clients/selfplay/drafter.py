"""Make a drafter from nothing but its target: ``python -m clients.selfplay.drafter --out FOLDER``.

Starts a server and a recorder, has the target write prompts and answer them (see ``generate``), and
trains a drafter from the recording with ``paceline learn --replay``. The recording and the prompts
stay in the work folder; a step whose result is there already is not repeated.
"""

from __future__ import annotations

import argparse
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from clients.process import ServerProcess, console_script
from clients.selfplay import generate

RECORD_DEADLINE = 60.0
"""Seconds a recorder is given to end its file."""

NEVER = "1000000"
"""The probe interval: what is recorded is served without drafts, which is fastest in large batches."""


def record(args: argparse.Namespace, recording: Path, prompts: Path) -> None:
    """Serve the target to itself and keep the traces."""
    endpoint = f"ipc://{args.work.absolute()}/recorder"
    common = ["--home", str(args.work / "home"), "--target", args.target]
    command = [str(console_script()), "record", *common, "--bind", endpoint]
    partial = recording.with_suffix(".partial")
    partial.unlink(missing_ok=True)
    prompts.unlink(missing_ok=True)
    recorder = subprocess.Popen([*command, "--out", str(partial)])
    flags = ["--target", args.target, "--learner", endpoint, "--draft", "none"]
    flags += ["--probe-interval", NEVER, "--", "--max-num-seqs", str(args.concurrency)]
    try:
        with ServerProcess(args.work / "home", flags) as server:
            words = ["--url", server.openai_url, "--tokens", str(args.tokens)]
            words += ["--prompts", str(prompts), "--concurrency", str(args.concurrency)]
            words += ["--seed", str(args.seed)]
            if args.avoid:
                words += ["--avoid", *map(str, args.avoid)]
            generate.main(words)
        recorder.send_signal(signal.SIGTERM)
        if recorder.wait(RECORD_DEADLINE) != 0:
            raise SystemExit(f"the recorder failed with exit code {recorder.returncode}")
    finally:
        recorder.kill()
        recorder.wait()
    partial.rename(recording)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m clients.selfplay.drafter", description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="the drafter's folder; is made")
    parser.add_argument("--work", type=Path, required=True, help="recording, prompts, home folder")
    parser.add_argument("--target", default="embedded")
    parser.add_argument("--tokens", type=int, default=250_000, help="answer tokens to learn from")
    parser.add_argument("--passes", type=float, default=5.0, help="times each token is trained on")
    parser.add_argument("--draft-vocab", type=int, default=8192)
    parser.add_argument("--batch-tokens", type=int, default=512)
    parser.add_argument("--concurrency", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--avoid", type=Path, nargs="*", default=[], metavar="FILE.jsonl",
        help="workload files whose prompts are never sent",
    )  # fmt: skip
    args = parser.parse_args(argv)
    args.work.mkdir(parents=True, exist_ok=True)
    recording, prompts = args.work / "self.traces", args.work / "prompts.jsonl"
    if not recording.exists():
        record(args, recording, prompts)
    learned = subprocess.run(
        [
            str(console_script()), "learn", "--replay", str(recording), "--out", str(args.out),
            "--home", str(args.work / "home"), "--target", args.target,
            "--draft-vocab", str(args.draft_vocab), "--batch-tokens", str(args.batch_tokens),
            "--replay-ratio", str(args.passes), "--replay-gib", "16",
            "--heldout-share", "0.08", "--seed", str(args.seed), "--nice", "0",
        ],
        check=False,
    )  # fmt: skip
    return learned.returncode


if __name__ == "__main__":
    sys.exit(main())
