"""Starts the modes' servers, carries out a plan on them, and keeps what was measured if it is cut short."""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import msgspec

from clients.bench import common
from clients.bench.modes import check_draft, check_gguf, make_server, target_folder
from clients.bench.plan import ONLINE, OURS, Block
from clients.bench.runner import Runner
from clients.bench.samples import Sample
from clients.process import ServerFailed, ServerProcess


class Session(msgspec.Struct, kw_only=True):
    """A run that is over."""

    facts: dict[str, Any]
    target: Path
    servers: dict[str, ServerProcess]
    skipped: list[str]
    """Why modes that were asked for are not in it."""
    blocks: list[Block]
    runner: Runner
    final_status: dict[str, Any] | None
    """Of the online server."""
    stopped: str | None
    """Why it ended before its plan did."""

    def subtitle(self, *words: str) -> str:
        """What a picture says of the run."""
        return (
            f"{self.target.name}, {', '.join(words)}; "
            f"{self.facts['cores']} cores, {self.facts['cpu']}"
        )

    def exit_code(self) -> int:
        """1 if a request failed; raises BenchError when the run was cut short."""
        samples = self.runner.samples
        if self.stopped is not None:
            raise common.BenchError(f"stopped after {len(samples)} samples: {self.stopped}")
        return 1 if any(sample.failed for sample in samples) else 0


def carry_out(
    args: argparse.Namespace, modes: Sequence[str], skipped: list[str], blocks: list[Block]
) -> Session:
    """Raises BenchError or ServerFailed when nothing at all was measured."""
    if {*OURS, "eagle3"} & set(modes):
        check_draft(args.draft, modes)
    check_gguf(args, modes)
    say = common.console.print
    for line in skipped:
        say(line)
    home = args.home or Path(tempfile.mkdtemp(prefix="paceline-bench-"))
    facts = common.machine_facts()
    target = target_folder(args.target, home / "target")
    servers = {mode: make_server(mode, args, home / mode, target) for mode in modes}
    say(f"{size_of(blocks)}; logs: {home}/*.log")

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
    return Session(
        facts=facts,
        target=target,
        servers=servers,
        skipped=skipped,
        blocks=blocks,
        runner=runner,
        final_status=status,
        stopped=stopped,
    )


def size_of(blocks: Sequence[Block]) -> str:
    """Said before it starts."""
    prompts = sum(len(b.prompts) for b in blocks)
    requests = sum(len(b.prompts) * len(b.modes) for b in blocks)
    return f"{prompts} prompts, {requests} requests in {len(blocks)} blocks"
