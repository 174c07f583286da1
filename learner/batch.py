"""Spans: what the learner keeps of a VerifyTrace, and batches of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rlcore.records.trace import Sampling, VerifyStep, VerifyTrace
from rlcore.records.wire import RecordError


@dataclass(frozen=True)
class Span:
    """One span of one request; row i belongs to position ``first_position + i``.

    ``token_ids`` [n + 1]: the last token has no states yet. ``aux`` [n, A] or None, ``last`` [n, H]
    in the serving dtype; ``lse`` [n] float32, NaN where the target computed no logits.
    """

    token_ids: Tensor
    aux: Tensor | None
    last: Tensor
    lse: Tensor
    first_position: int
    prompt_length: int
    prompt_hash: str
    steps: tuple[VerifyStep, ...]
    sampling: Sampling
    tenant: str
    request_id: str
    adapter: str = ""
    """LoRA adapter of the target that it was sampled with; empty for the target itself."""
    ended: float = 0.0
    """When its response ended, seconds since the epoch."""

    @property
    def stream(self) -> str:
        """What is judged by itself: a tenant's traffic with one adapter. No tenant's name has a slash."""
        return f"{self.tenant}/{self.adapter}" if self.adapter else self.tenant

    @property
    def rows(self) -> int:
        return self.last.shape[0]

    @property
    def first_anchor(self) -> int:
        """The first row that drafting starts from: the token after it is an output token."""
        return max(0, self.prompt_length - 1 - self.first_position)

    @property
    def anchors(self) -> int:
        """How many rows something is drafted from and can be judged: those up to row n - 2."""
        return max(0, self.rows - 1 - self.first_anchor)

    @property
    def nbytes(self) -> int:
        tensors = (self.token_ids, self.aux, self.last, self.lse)
        return sum(t.nbytes for t in tensors if t is not None)

    @classmethod
    def from_trace(cls, trace: VerifyTrace, frames: Sequence[bytes | memoryview]) -> Span:
        """A span over the frames' own memory (a read-only frame is copied).

        ``frames`` are the tensor frames in the order of ``trace.tensors``, sizes already checked by
        ``decode_trace``. Raises RecordError when there is nothing to learn from.
        """
        found = {
            spec.name: _tensor(frame, spec.dtype, spec.shape)
            for spec, frame in zip(trace.tensors, frames, strict=True)
        }
        if "last" not in found:
            raise RecordError("tensors", "no last hidden states")
        # A trimmed trace has a row for its last token too; that row predicts nothing known.
        rows = min(found["last"].shape[0], len(trace.token_ids) - 1)
        if rows < 1:
            raise RecordError("tensors", "no row whose next token is known")
        aux = found.get("aux")
        lse = found.get("logsumexp")
        return cls(
            token_ids=torch.tensor(trace.token_ids[: rows + 1]),
            aux=None if aux is None else aux[:rows],
            last=found["last"][:rows],
            lse=torch.full((rows,), torch.nan) if lse is None else lse[:rows].float(),
            first_position=trace.first_position,
            prompt_length=trace.prompt_length,
            prompt_hash=trace.prompt_hash,
            steps=tuple(trace.steps),
            sampling=trace.sampling,
            tenant=trace.tenant,
            request_id=trace.request_id,
            ended=trace.ended,
            adapter=trace.adapter,
        )

    def check(self, *, vocab_size: int, hidden_size: int, aux_size: int | None) -> None:
        """Raises RecordError unless the span fits the target; ``aux_size`` None asks for no aux."""
        if self.last.shape[1] != hidden_size:
            raise RecordError("tensors", f"hidden size {self.last.shape[1]}, not {hidden_size}")
        if aux_size is not None and (self.aux is None or self.aux.shape[1] != aux_size):
            width = None if self.aux is None else self.aux.shape[1]
            raise RecordError("tensors", f"auxiliary width {width}, not {aux_size}")
        if int(self.token_ids.max()) >= vocab_size:
            raise RecordError("tokens", f"token id {int(self.token_ids.max())} of {vocab_size}")


def _tensor(frame: bytes | memoryview, dtype: str, shape: tuple[int, ...]) -> Tensor:
    view = memoryview(frame)
    if view.nbytes == 0:
        return torch.empty(shape, dtype=getattr(torch, dtype))
    buffer = bytearray(view) if view.readonly else view
    return torch.frombuffer(buffer, dtype=getattr(torch, dtype)).view(shape)


@dataclass(frozen=True)
class SpanBatch:
    """B spans, padded at the end to S rows; states are float32.

    token_ids  [B, S + 1]  row i's token stands at position ``positions[b] + i``
    positions  [B]         first positions
    lengths    [B]         rows of each span
    aux        [B, S, A] or None;  last [B, S, H];  lse [B, S], NaN where none
    loss_mask  [B, S]      the token after the row is an output token, and the row is real
    anchor_span, anchor_row  [N]: the rows that drafting starts from (see drafters/base.py), span by
    span in ascending order; those whose first proposal can be judged, i.e. rows up to length - 2
    """

    token_ids: Tensor
    positions: Tensor
    lengths: Tensor
    aux: Tensor | None
    last: Tensor
    lse: Tensor
    loss_mask: Tensor
    anchor_span: Tensor
    anchor_row: Tensor

    def judged(self, step: int) -> Tensor:
        """[N] bool: draft step ``step`` of the anchor has a target row to be compared with."""
        return self.anchor_row + 1 + step < self.lengths[self.anchor_span]

    def tokens_after(self, offset: int) -> Tensor:
        """[N]: the token ``offset`` positions after each anchor's row; padding behind the end."""
        column = (self.anchor_row + offset).clamp(max=self.token_ids.shape[1] - 1)
        return self.token_ids[self.anchor_span, column]

    def anchor_ranges(self) -> list[tuple[int, int, int]]:
        """(first index into the N anchors, first row, number of anchors) of each span."""
        counts = torch.bincount(self.anchor_span, minlength=len(self.lengths)).tolist()
        ranges, start = [], 0
        for count in counts:
            row = int(self.anchor_row[start]) if count else 0
            ranges.append((start, row, count))
            start += count
        return ranges


def collate(spans: Sequence[Span], *, with_aux: bool) -> SpanBatch:
    """A batch of spans; ``with_aux`` as the drafter's ``needs_aux``."""
    rows = max(span.rows for span in spans)
    size = (len(spans), rows)
    lengths = torch.tensor([span.rows for span in spans])
    token_ids = torch.zeros(len(spans), rows + 1, dtype=torch.long)
    last = torch.zeros(*size, spans[0].last.shape[1])
    lse = torch.full(size, torch.nan)
    loss_mask = torch.zeros(size, dtype=torch.bool)
    aux = None
    if with_aux:
        widths = [span.aux.shape[1] for span in spans if span.aux is not None]
        if len(widths) < len(spans):
            raise ValueError("a span without auxiliary states in a batch that needs them")
        aux = torch.zeros(*size, widths[0])
    anchors = []
    for b, span in enumerate(spans):
        n = span.rows
        token_ids[b, : n + 1] = span.token_ids
        last[b, :n] = span.last
        lse[b, :n] = span.lse
        loss_mask[b, span.first_anchor : n] = True
        if aux is not None and span.aux is not None:
            aux[b, :n] = span.aux
        row = torch.arange(span.first_anchor, span.first_anchor + span.anchors)
        anchors.append(torch.stack([torch.full_like(row, b), row]))
    anchor_span, anchor_row = torch.cat(anchors, dim=1)
    positions = torch.tensor([span.first_position for span in spans])
    return SpanBatch(
        token_ids, positions, lengths, aux, last, lse, loss_mask, anchor_span, anchor_row
    )
