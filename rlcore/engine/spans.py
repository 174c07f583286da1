"""Puts the verification steps of one request together into VerifyTrace spans.

No vLLM and no I/O here: a builder is fed what each step computed and gives spans out. Positions are
absolute. A builder never takes a position twice, so recomputation after a preemption adds nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch

from rlcore.records.trace import Sampling, VerifyStep, VerifyTrace
from rlcore.records.wire import RecordError, TensorSpec


@dataclass(frozen=True)
class RequestFacts:
    """What holds for the whole of one request."""

    request_id: str
    prompt_length: int
    prompt_hash: str
    sampling: Sampling
    target_version: int
    adapter: str = ""


@dataclass
class Span:
    """A finished span: the record and its tensors, [n, ...] each, in SPAN_TENSORS order."""

    trace: VerifyTrace
    tensors: list[torch.Tensor]

    def frames(self) -> list[memoryview]:
        """The tensors' bytes, without a copy."""
        return [t.contiguous().view(torch.uint8).numpy().data.cast("B") for t in self.tensors]


@dataclass
class SpanBuilder:
    """Collects one request. ``max_tokens`` bounds a span; longer requests give several."""

    facts: RequestFacts
    max_tokens: int
    first_position: int = 0
    span_index: int = 0
    grammar: bool = False
    token_ids: list[int] = field(default_factory=list)
    steps: list[VerifyStep] = field(default_factory=list)
    _rows: dict[str, list[torch.Tensor]] = field(default_factory=dict)
    _row_count: int = 0
    _begun: bool = False

    @property
    def next_position(self) -> int:
        """The first position whose states are still missing."""
        return self.first_position + self._row_count

    def observe(
        self,
        start: int,
        input_ids: Sequence[int],
        rows: dict[str, torch.Tensor],
        step: VerifyStep | None,
    ) -> Span | None:
        """Take one step's result.

        ``input_ids`` are the on-path tokens whose states were computed, at positions ``start`` and
        on; ``rows`` holds their states [len(input_ids), ...] by tensor name; ``step`` is the
        verification step, None while a prompt is still being read. Returns a span when this one is
        full, or when the step leaves a gap behind the positions seen so far. Raises RecordError when
        the step does not continue the tokens known.
        """
        finished = None
        if not self._begun:
            self._begin(start)
        elif start > self.next_position:
            finished = self.flush(final=False)
            self._begin(start)
        skip = self.next_position - start
        if skip < len(input_ids):
            for name, tensor in rows.items():
                self._rows.setdefault(name, []).append(tensor[skip:])
            self._row_count += len(input_ids) - skip
        # Accepted drafts are inputs of the very step that emits them; take them from the step.
        given = len(input_ids) if step is None else step.position - start
        known = self.first_position + len(self.token_ids) - start
        self.token_ids.extend(input_ids[known:given])
        if step is not None:
            if step.position != self.first_position + len(self.token_ids):
                raise RecordError("steps", f"step at {step.position} does not follow the tokens")
            self.token_ids.extend([*step.draft_ids[: step.accepted], step.replacement])
            self.steps.append(step)
        if finished is None and self._row_count >= self.max_tokens:
            finished = self.flush(final=False)
        return finished

    def _begin(self, position: int) -> None:
        self.first_position = position
        self._begun = True

    def retarget(self, version: int) -> Span | None:
        """What comes from now on is of another target version; the span of the one before, if any."""
        span = self.flush(final=False)
        self.facts = replace(self.facts, target_version=version)
        return span

    def flush(self, *, final: bool) -> Span | None:
        """The span so far; the builder goes on behind it. None when it holds no states."""
        if self._row_count == 0:
            return None
        tensors = {name: torch.cat(parts) for name, parts in self._rows.items()}
        names = [name for name in VerifyTrace.SPAN_TENSORS if name in tensors]
        trace = VerifyTrace(
            request_id=self.facts.request_id,
            tenant="",
            target_version=self.facts.target_version,
            span_index=self.span_index,
            final=final,
            first_position=self.first_position,
            prompt_length=self.facts.prompt_length,
            prompt_hash=self.facts.prompt_hash,
            token_ids=self.token_ids,
            sampling=self.facts.sampling,
            grammar=self.grammar,
            steps=self.steps,
            tensors=[_spec(name, tensors[name]) for name in names],
            adapter=self.facts.adapter,
        )
        span = Span(trace, [tensors[name] for name in names])
        carried = self.token_ids[self._row_count :]
        self.first_position += self._row_count
        self.span_index += 1
        self.token_ids, self.steps = carried, []
        self._rows, self._row_count = {}, 0
        return span


def trim(span: Span, end_position: int) -> Span | None:
    """The span without anything at or behind ``end_position``; None when nothing is left.

    The engine may run past a stop string or an abort; what the response did not return is no signal.
    A step cut in its middle keeps its tokens: the last one kept stands as its replacement.
    """
    trace = span.trace
    keep = end_position - trace.first_position
    if keep >= len(trace.token_ids):
        return span
    if keep <= 0:
        return None
    steps = []
    for step in trace.steps:
        left = end_position - step.position
        if left > step.accepted:
            steps.append(step)
        elif left > 0:
            steps.append(
                VerifyStep(
                    position=step.position,
                    draft_version=step.draft_version,
                    draft_ids=step.draft_ids[: left - 1],
                    accepted=left - 1,
                    replacement=step.draft_ids[left - 1],
                    draft_logprobs=step.draft_logprobs[: left - 1],
                    logsumexp=step.logsumexp[: left - 1],
                    draft_probs=step.draft_probs[: left - 1],
                )
            )
    tensors = [tensor[:keep] for tensor in span.tensors]
    trace.token_ids = trace.token_ids[:keep]
    trace.steps = steps
    trace.tensors = [_spec(spec.name, t) for spec, t in zip(trace.tensors, tensors, strict=True)]
    return Span(trace, tensors)


def _spec(name: str, tensor: torch.Tensor) -> TensorSpec:
    return TensorSpec(name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))
