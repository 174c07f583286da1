"""What the engine tells the learner: the spans of a request, and what was verified in them.

Positions are absolute: position 0 is the first prompt token. A span that starts after a prefix-cache
hit keeps its absolute first position.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, ClassVar

import msgspec
from msgspec import Meta

from rlcore.records.wire import (
    DTYPE_BYTES,
    SCHEMA_VERSION,
    Count,
    Id,
    Position,
    RecordError,
    TensorSpec,
    TokenId,
    decode,
)

MAX_SPAN_TOKENS = 65_536
"""Longest span that a receiver accepts, in tokens."""


class Sampling(msgspec.Struct, frozen=True):
    """The sampling parameters that turn raw target logits into the p that decided."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    """0 keeps the whole vocabulary."""


class VerifyStep(msgspec.Struct, array_like=True):
    """One verification step of one request.

    The step emits ``accepted + 1`` tokens at ``position .. position + accepted``: the accepted draft
    tokens, then ``replacement``, which is the target's own token in place of the first rejected one
    (or the bonus token when all were accepted). ``draft_ids`` is empty for a step without drafts.
    """

    position: Position
    draft_version: int
    draft_ids: list[TokenId]
    accepted: Count
    replacement: TokenId
    draft_logprobs: list[float] = []
    """Raw target log-probability of the drafts, up to and including the first rejected one."""
    logsumexp: list[float] = []
    """Raw logsumexp of the target logits at those same positions."""
    draft_probs: list[float] = []
    """The drafter's own probability of its drafts; empty unless it samples."""


class VerifyTrace(msgspec.Struct, tag="trace", tag_field="kind"):
    """One span of one request: its tokens, its verification steps, and the target's states.

    ``token_ids[i]`` stands at position ``first_position + i``. Tensor frames, n rows each with
    n <= len(token_ids), row i belonging to position ``first_position + i``:

    - ``aux``  [n, number of auxiliary layers * hidden]: what an EAGLE-3 drafter reads (may be absent)
    - ``last`` [n, hidden]: the target's last hidden state, after the final norm
    - ``logsumexp`` [n] float32: raw logsumexp of the logits of that row, NaN where none were computed
    """

    SPAN_TENSORS: ClassVar[tuple[str, ...]] = ("aux", "last", "logsumexp")

    request_id: Id
    tenant: Id
    target_version: int
    span_index: Count
    final: bool
    first_position: Position
    prompt_length: Position
    prompt_hash: Id
    """blake2b of the whole prompt's token ids: held-out splits go by it."""
    token_ids: Annotated[list[TokenId], Meta(max_length=MAX_SPAN_TOKENS)]
    sampling: Sampling
    grammar: bool
    steps: list[VerifyStep]
    tensors: list[TensorSpec]
    adapter: Id = ""
    """LoRA adapter that the request named; empty for the target itself, and in traces from before there
    were adapters."""
    ended: float = 0.0
    """When the response ended: seconds since the epoch by the server's clock, which does not go back
    while it runs. Retention and purges go by it. 0 in traces from before it was kept."""
    schema: int = SCHEMA_VERSION

    def emitted_ids(self) -> list[int]:
        """The tokens this span's steps emitted. Those of a request's spans, one after the other,
        are the token ids its response returned (neighbouring spans share one token of context)."""
        return [
            i for step in self.steps for i in (*step.draft_ids[: step.accepted], step.replacement)
        ]


_decoder = msgspec.msgpack.Decoder(VerifyTrace)


def decode_trace(frames: Sequence[bytes | memoryview]) -> VerifyTrace:
    """The header of a trace message, its frames' sizes checked against it; raises RecordError."""
    if not frames:
        raise RecordError("malformed", "empty message")
    trace: VerifyTrace = decode(_decoder, frames[0])
    check_trace(trace)
    if len(frames) != 1 + len(trace.tensors):
        raise RecordError("frames", f"{len(frames) - 1} frames for {len(trace.tensors)} tensors")
    for spec, frame in zip(trace.tensors, frames[1:], strict=True):
        if len(frame) != spec.nbytes:
            raise RecordError("frames", f"{spec.name}: {len(frame)} bytes, {spec.nbytes} announced")
    return trace


def check_trace(trace: VerifyTrace) -> None:
    """The relations inside a trace that its schema alone cannot hold; raises RecordError."""
    names = [spec.name for spec in trace.tensors]
    if len(set(names)) != len(names) or not set(names) <= set(VerifyTrace.SPAN_TENSORS):
        raise RecordError("tensors", f"unknown or repeated tensor in {names}")
    for spec in trace.tensors:
        if spec.dtype not in DTYPE_BYTES:
            raise RecordError("tensors", f"{spec.name}: dtype {spec.dtype!r}")
        rank = 1 if spec.name == "logsumexp" else 2
        if len(spec.shape) != rank or spec.shape[0] > len(trace.token_ids):
            raise RecordError("tensors", f"{spec.name}: shape {spec.shape}")
    if len({spec.shape[0] for spec in trace.tensors}) > 1:
        raise RecordError("tensors", "tensors of different lengths")
    end = trace.first_position + len(trace.token_ids)
    before = max(trace.first_position, trace.prompt_length)
    for step in trace.steps:
        if step.accepted > len(step.draft_ids):
            raise RecordError("steps", f"{step.accepted} accepted of {len(step.draft_ids)}")
        if step.position < before or step.position + step.accepted >= end:
            raise RecordError("steps", f"step at {step.position} outside the span")
        offset = step.position - trace.first_position
        emitted = [*step.draft_ids[: step.accepted], step.replacement]
        if trace.token_ids[offset : offset + len(emitted)] != emitted:
            raise RecordError("steps", f"step at {step.position} disagrees with the tokens")
        before = step.position + step.accepted + 1
