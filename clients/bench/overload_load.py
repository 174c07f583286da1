"""Starts locust in a process of its own, and reads what its users wrote."""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import os
import sys
import time
from pathlib import Path

import msgspec

from clients.bench import common
from clients.bench.overload_figures import Event
from clients.process import ServerProcess

BEGIN_DEADLINE_S = 120.0
"""For locust to begin."""

LOCUSTFILE = Path(__file__).with_name("overload_user.py")


async def start_locust(
    args: argparse.Namespace, server: ServerProcess, out: Path, users: int, pace: float, model: str
) -> asyncio.subprocess.Process:
    """``users`` who each ask every ``pace`` seconds; what becomes of it goes to ``out``, line by line."""
    settings = {
        "out": str(out), "model": model, "max_tokens": args.max_tokens, "pace": pace,
        "deadline": args.deadline, "seed": args.seed, "seconds": args.seconds,
    }  # fmt: skip
    command = [
        sys.executable, "-m", "locust", "--headless", "--locustfile", str(LOCUSTFILE),
        "--host", server.url, "--users", str(users), "--spawn-rate", str(users),
        "--stop-timeout", str(math.ceil(args.deadline)), "--only-summary", "--exit-code-on-error", "0",
    ]  # fmt: skip
    environment = {**os.environ, "PACELINE_OVERLOAD": json.dumps(settings), "NO_PROXY": "127.0.0.1"}
    with open(out.with_suffix(".log"), "wb") as log:
        return await asyncio.create_subprocess_exec(
            *command, env=environment, stdout=log, stderr=log, stdin=asyncio.subprocess.DEVNULL
        )


async def wait_for_first(out: Path, process: asyncio.subprocess.Process) -> float:
    """When the first request was sent, seconds since the epoch."""
    deadline = time.monotonic() + BEGIN_DEADLINE_S
    while not out.exists() or b"\n" not in out.read_bytes():
        if process.returncode is not None or time.monotonic() > deadline:
            raise common.BenchError(f"locust did not begin; its words: {out.with_suffix('.log')}")
        await asyncio.sleep(0.2)
    return min(event.started for event in events_in(out))


def events_in(out: Path) -> list[Event]:
    """The requests that have ended."""
    lines = out.read_bytes().split(b"\n")[:-1]
    return [msgspec.json.decode(line, type=Event) for line in lines]
