"""What the JSON of ``paceline bench`` and ``paceline bench sweep`` hold of a run besides their figures."""

from __future__ import annotations

import argparse
import os
from typing import Any

import msgspec

from clients.bench.modes import MODES, environment_of
from clients.bench.session import Session
from clients.load import RequestRecord

BULKY = ("chunk_times", "token_ids", "text")
"""Of a record, left out of the JSON."""


def run_json(args: argparse.Namespace, session: Session) -> dict[str, Any]:
    """The fields are listed in ``clients.bench.report``."""
    runner = session.runner
    return {
        "machine": session.facts,
        "load_average_after": os.getloadavg(),
        "options": vars(args),
        "modes": {
            mode: {
                "what": MODES[mode],
                "command": server.command(),
                "environment": environment_of(server),
                "start_seconds": server.start_seconds,
            }
            for mode, server in session.servers.items()
        },
        "skipped": session.skipped,
        "blocks": [
            {
                "number": b.number,
                "phase": b.phase,
                "measured": b.measured,
                "modes": b.modes,
                "concurrency": b.concurrency,
                "prompts": len(b.prompts),
            }
            for b in session.blocks
        ],
        "samples": [
            {
                **msgspec.to_builtins(s),
                "tokens_per_second": s.tokens_per_second,
                "acceptance_length": s.acceptance_length,
                "tokens_per_step": s.tokens_per_step,
            }
            for s in runner.samples
        ],
        "readings": runner.readings,
        "records": [
            {"block": part.block, "mode": part.mode, **_slim(record)}
            for part in runner.records
            for record in part.records
        ],
        "final_status": session.final_status,
        "stopped": session.stopped,
    }


def _slim(record: RequestRecord) -> dict[str, Any]:
    return {k: v for k, v in msgspec.to_builtins(record).items() if k not in BULKY}
