"""Spans with nothing in them, for tests of where spans go."""

from __future__ import annotations

import torch

from learner.batch import Span
from rlcore.records.trace import Sampling, VerifyTrace
from rlcore.records.wire import TensorSpec, encode

NEVER, ALWAYS = "f" * 32, "0" * 32
"""Prompt hashes that no share, or every share, holds out."""


def span(
    name: object, rows: int, prompt: str = NEVER, prompt_length: int = 2, tenant: str = "t"
) -> Span:
    """``rows - prompt_length`` anchors; its request is called after ``name``."""
    return Span(
        token_ids=torch.zeros(rows + 1, dtype=torch.long), aux=None, last=torch.zeros(rows, 4),
        lse=torch.zeros(rows), first_position=0, prompt_length=prompt_length, prompt_hash=prompt,
        steps=(), sampling=Sampling(), tenant=tenant, request_id=str(name),
    )  # fmt: skip


def message(number: int, rows: int) -> list[bytes]:
    """A trace message with one tensor, of so many rows."""
    trace = VerifyTrace(
        request_id=f"r{number}", tenant="t", target_version=0, span_index=0, final=True,
        first_position=0, prompt_length=1, prompt_hash="h", token_ids=[1] * (rows + 1),
        sampling=Sampling(), grammar=False, steps=[],
        tensors=[TensorSpec("last", "float32", (rows, 2))],
    )  # fmt: skip
    return [encode(trace), bytes([number % 256]) * (rows * 8)]
