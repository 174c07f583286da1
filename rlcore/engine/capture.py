"""Reads each verification step off the model runner and turns it into trace spans.

Runs inside the engine's step, so it does little: it looks at the step's state, copies the on-path
rows, and hands finished spans to the courier thread. Read against vLLM 0.32.0, V1 model runner with
synchronous scheduling: ``execute_model_state`` (hidden, auxiliary states, logits),
``input_batch.req_ids`` and ``num_computed_tokens_cpu``, ``requests``.

Rows of a request in a step: n scheduled tokens from position s, the last k of them drafts. Its
logits rows are the last k + 1 scheduled positions. With a drafts accepted, positions
s .. s + n - k + a - 1 are on the path and the step emits tokens s + n - k .. s + n - k + a.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from rlcore.engine.adapter_counts import AdapterCounts, name_of
from rlcore.engine.spans import RequestFacts, Span, SpanBuilder
from rlcore.records.acceptance import AcceptanceCount
from rlcore.records.trace import Sampling, VerifyStep
from rlcore.records.wire import RecordError

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.outputs import ModelRunnerOutput

REMEMBERED_REQUESTS = 4096
"""Finished requests whose acceptance counts can still be asked for."""


@dataclass
class _Row:
    """One request of the step, as scheduled."""

    request_id: str
    start: int
    scheduled: int
    drafts: list[int]
    token_offset: int
    """Index of its first token in the flattened batch."""
    logit_offset: int
    """Index of its first row of logits."""
    draft_version: int
    draft_probs: list[float]


@dataclass
class StepView:
    """What is read before sampling, because sampling edits or frees it."""

    rows: list[_Row]
    last: torch.Tensor
    aux: list[torch.Tensor] | None
    logsumexp: torch.Tensor | None
    draft_logits: torch.Tensor | None
    grammar_ids: frozenset[str]


def prompt_hash(token_ids: list[int]) -> str:
    return hashlib.blake2b(np.asarray(token_ids, np.int32).tobytes(), digest_size=16).hexdigest()


class Capture:
    """Counts acceptance for every request, and builds spans for those that are sampled."""

    def __init__(
        self,
        *,
        target_version: int,
        rate: float,
        span_tokens: int,
        emit: Callable[[str, Span | None, bool], None] | None,
        drop: Callable[[str], None],
    ) -> None:
        self._target_version = target_version
        self._rate = rate
        self._span_tokens = span_tokens
        self._emit = emit
        self._drop = drop
        self._builders: dict[str, SpanBuilder] = {}
        self._given_up: set[str] = set()
        self._proposed_by: dict[str, int] = {}
        self.acceptance: dict[int, AcceptanceCount] = {}
        self.adapters = AdapterCounts()
        self._by_request: OrderedDict[str, dict[int, AcceptanceCount]] = OrderedDict()

    def finish(self, request_ids: set[str]) -> None:
        """These requests ended in the step before: give out what they still hold."""
        for request_id in request_ids:
            self._proposed_by.pop(request_id, None)
            self._given_up.discard(request_id)
            builder = self._builders.pop(request_id, None)
            if builder is not None and self._emit is not None:
                self._emit(request_id, builder.flush(final=True), True)

    def new_target(self, version: int) -> None:
        """The target's weights are exchanged: what was captured so far is the old version's."""
        self._target_version = version
        for request_id, builder in self._builders.items():
            span = builder.retarget(version)
            if span is not None and self._emit is not None:
                self._emit(request_id, span, False)

    def request_acceptance(self, request_ids: list[str]) -> list[AcceptanceCount]:
        """Counts by draft version, summed over the given requests."""
        total: dict[int, AcceptanceCount] = {}
        for request_id in request_ids:
            for version, count in self._by_request.get(request_id, {}).items():
                into = total.setdefault(version, AcceptanceCount(version))
                into.steps += count.steps
                into.plain_steps += count.plain_steps
                into.emitted += count.emitted
                into.drafted = _add(into.drafted, count.drafted)
                into.accepted = _add(into.accepted, count.accepted)
        return [total[version] for version in sorted(total)]

    def request_drafted(self, request_id: str) -> tuple[int, int]:
        """Its steps in which drafts were verified, and the tokens they emitted. For any thread."""
        counts = list(self._by_request.get(request_id, {}).values())
        return sum(count.steps for count in counts), sum(count.emitted for count in counts)

    def before_sampling(self, runner: Any, grammar_ids: frozenset[str]) -> StepView:
        """Read the forward pass's state; ``runner`` is a V1 model runner between its two halves."""
        state = runner.execute_model_state
        scheduled: SchedulerOutput = state.scheduler_output
        batch = runner.input_batch
        speculative = state.spec_decode_metadata is not None
        rows: list[_Row] = []
        token_offset = logit_offset = 0
        for index, request_id in enumerate(batch.req_ids):
            count = scheduled.num_scheduled_tokens[request_id]
            drafts = scheduled.scheduled_spec_decode_tokens.get(request_id, [])
            rows.append(
                _Row(
                    request_id=request_id,
                    start=int(batch.num_computed_tokens_cpu[index]),
                    scheduled=count,
                    drafts=drafts,
                    token_offset=token_offset,
                    logit_offset=logit_offset,
                    draft_version=self._proposed_by.get(request_id, -1),
                    draft_probs=_draft_probs(runner, request_id, drafts),
                )
            )
            token_offset += count
            logit_offset += len(drafts) + 1 if speculative else 1
        logsumexp = draft_logits = None
        # Every row is asked: the question is also what begins a request's capture.
        wanted = [self._wants(runner, row) for row in rows] if self._emit is not None else []
        if any(wanted):
            logits = state.logits
            logsumexp = _row_sums(logits)
            if speculative:
                at = state.spec_decode_metadata.target_logits_indices.to(torch.int64)
                ids = state.spec_decode_metadata.draft_token_ids.to(torch.int64)
                draft_logits = logits.new_zeros(logits.shape[0], dtype=torch.float32)
                draft_logits[at] = logits[at, ids].float()
        return StepView(
            rows=rows,
            last=state.hidden_states,
            aux=state.aux_hidden_states,
            logsumexp=logsumexp,
            draft_logits=draft_logits,
            grammar_ids=grammar_ids,
        )

    def after_sampling(
        self, runner: Any, view: StepView, output: ModelRunnerOutput, draft_version: int
    ) -> None:
        """Take the step's outcome. ``draft_version`` is the drafter that has just proposed."""
        path: list[tuple[_Row, list[int]]] = []
        for row, sampled in zip(view.rows, output.sampled_token_ids, strict=True):
            self._proposed_by[row.request_id] = draft_version
            path.append((row, sampled))
            request = runner.requests[row.request_id]
            if sampled and (row.drafts or row.start >= request.num_prompt_tokens):
                self._count(row, len(sampled) - 1, name_of(request))
        if view.logsumexp is not None:
            self._record(runner, view, path)

    def _count(self, row: _Row, accepted: int, adapter: str) -> None:
        k = 0 if _placeholder(row.drafts) else len(row.drafts)
        version = row.draft_version
        by_version = self._by_request.setdefault(row.request_id, {})
        self._by_request.move_to_end(row.request_id)
        for counts in (by_version, self.acceptance):
            counts.setdefault(version, AcceptanceCount(version)).observe(k, accepted)
        if adapter:
            self.adapters.observe(adapter, version, k, accepted)
        while len(self._by_request) > REMEMBERED_REQUESTS:
            self._by_request.popitem(last=False)

    def _wants(self, runner: Any, row: _Row) -> bool:
        """Whether this request is captured; the choice is made once, by a hash of its id."""
        if row.request_id in self._builders:
            return True
        if row.request_id in self._given_up:
            return False
        request = runner.requests[row.request_id]
        params = request.sampling_params
        if params is None or request.prompt_token_ids is None:
            return False
        digest = hashlib.blake2b(row.request_id.encode(), digest_size=8).digest()
        if int.from_bytes(digest, "big") >= self._rate * 2**64:
            return False
        facts = RequestFacts(
            request_id=row.request_id,
            prompt_length=len(request.prompt_token_ids),
            prompt_hash=prompt_hash(request.prompt_token_ids),
            sampling=Sampling(params.temperature, params.top_p, max(0, params.top_k)),
            target_version=self._target_version,
            adapter=name_of(request),
        )
        self._builders[row.request_id] = SpanBuilder(facts, self._span_tokens)
        return True

    def _record(self, runner: Any, view: StepView, path: list[tuple[_Row, list[int]]]) -> None:
        kept = [(row, sampled) for row, sampled in path if row.request_id in self._builders]
        if not kept:
            return
        lengths = [
            row.scheduled - len(row.drafts) + len(sampled) - 1 if sampled else row.scheduled
            for row, sampled in kept
        ]
        index = torch.cat(
            [
                torch.arange(row.token_offset, row.token_offset + length)
                for (row, _), length in zip(kept, lengths, strict=True)
            ]
        ).to(view.last.device)
        tensors = {"last": view.last[index].cpu()}
        if view.aux is not None:
            tensors["aux"] = torch.cat([a[index] for a in view.aux], dim=-1).cpu()
        assert view.logsumexp is not None
        logsumexp = view.logsumexp.cpu()
        draft_logits = None if view.draft_logits is None else view.draft_logits.cpu()
        offset = 0
        for (row, sampled), length in zip(kept, lengths, strict=True):
            rows = {name: t[offset : offset + length] for name, t in tensors.items()}
            offset += length
            rows["logsumexp"] = _row_logsumexp(logsumexp, row, length, len(sampled))
            builder = self._builders[row.request_id]
            builder.grammar |= row.request_id in view.grammar_ids
            request = runner.requests[row.request_id]
            try:
                span = builder.observe(
                    row.start,
                    _tokens(request, row.start, row.start + length),
                    rows,
                    _verify_step(row, sampled, logsumexp, draft_logits) if sampled else None,
                )
            except RecordError as error:
                del self._builders[row.request_id]
                self._given_up.add(row.request_id)
                self._drop(error.reason)
                continue
            if span is not None and self._emit is not None:
                self._emit(row.request_id, span, False)


def _row_sums(logits: torch.Tensor) -> torch.Tensor:
    """logsumexp of each row of logits [n, V], float32.

    log_softmax(x)_0 = x_0 - logsumexp(x), and torch computes it in one pass where logsumexp takes four.
    """
    return logits[:, 0].float() - torch.log_softmax(logits, dim=-1, dtype=torch.float32)[:, 0]


def _placeholder(drafts: list[int]) -> bool:
    """The scheduler pads some decodes with -1: those were never proposed."""
    return any(token < 0 for token in drafts)


def _row_logsumexp(logsumexp: torch.Tensor, row: _Row, length: int, sampled: int) -> torch.Tensor:
    """[length] float32: known for the rows that decided an emitted token, NaN before them."""
    values = torch.full((length,), torch.nan)
    if sampled:
        values[length - sampled :] = logsumexp[row.logit_offset : row.logit_offset + sampled]
    return values


def _verify_step(
    row: _Row, sampled: list[int], logsumexp: torch.Tensor, draft_logits: torch.Tensor | None
) -> VerifyStep:
    drafts = [] if _placeholder(row.drafts) else row.drafts
    accepted = len(sampled) - 1
    step = VerifyStep(
        position=row.start + row.scheduled - len(row.drafts),
        draft_version=row.draft_version,
        draft_ids=list(drafts),
        accepted=accepted,
        replacement=sampled[-1],
    )
    if drafts and draft_logits is not None:
        seen = slice(row.logit_offset, row.logit_offset + min(accepted + 1, len(drafts)))
        step.logsumexp = logsumexp[seen].tolist()
        step.draft_logprobs = (draft_logits[seen] - logsumexp[seen]).tolist()
        step.draft_probs = row.draft_probs
    return step


def _tokens(request: Any, start: int, end: int) -> list[int]:
    """The request's token ids at positions [start, end), prompt and output together."""
    prompt: list[int] = request.prompt_token_ids
    if end <= len(prompt):
        return prompt[start:end]
    output: list[int] = request.output_token_ids
    return [*prompt[start:], *output[max(0, start - len(prompt)) : end - len(prompt)]]


def _draft_probs(runner: Any, request_id: str, drafts: list[int]) -> list[float]:
    """The drafter's probability of each of its drafts, when it sampled them."""
    if runner._draft_probs is None or runner._draft_prob_req_ids is None or not drafts:
        return []
    index = runner._draft_prob_req_ids.index(request_id)
    at = torch.arange(len(drafts))
    probs: list[float] = runner._draft_probs[index, at, torch.tensor(drafts)].tolist()
    return probs


def _add(a: list[int], b: list[int]) -> list[int]:
    short, long = sorted((a, b), key=len)
    return [x + y for x, y in zip(long, [*short, *[0] * (len(long) - len(short))], strict=True)]
