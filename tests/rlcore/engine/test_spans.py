"""A request's spans, put together, are its tokens and its states: each position once, in order."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlcore.engine.spans import RequestFacts, Span, SpanBuilder, trim
from rlcore.records.trace import Sampling, VerifyStep, check_trace, decode_trace
from rlcore.records.wire import RecordError, encode


def builder(prompt: int, max_tokens: int = 10_000) -> SpanBuilder:
    return SpanBuilder(RequestFacts("r", prompt, "h", Sampling(), 0), max_tokens)


def token(position: int) -> int:
    return 100 + position


def rows(start: int, count: int, version: int = 0) -> dict[str, torch.Tensor]:
    """States that name their own position, and the target version that computed them."""
    positions = torch.arange(start, start + count, dtype=torch.float32)
    last = positions[:, None].expand(count, 3).clone()
    last[:, 2] = version
    return {"last": last, "logsumexp": positions.clone()}


@dataclass
class Engine:
    """Plays an engine: feeds a builder, with preemption, chunked prefill and rejected drafts."""

    builder: SpanBuilder
    prompt: int
    computed: int = 0
    emitted: int = 0
    version: int = 0

    def __post_init__(self) -> None:
        self.spans: list[Span] = []

    @property
    def length(self) -> int:
        return self.prompt + self.emitted

    def _give(self, start: int, count: int, step: VerifyStep | None) -> None:
        ids = [token(p) for p in range(start, start + count)]
        span = self.builder.observe(start, ids, rows(start, count, self.version), step)
        if span is not None:
            self.spans.append(span)

    def read(self, chunk: int) -> None:
        """One chunk of what has no KV; the last chunk emits a token."""
        count = min(chunk, self.length - self.computed)
        start = self.computed
        self.computed += count
        step = None
        if self.computed == self.length:
            step = VerifyStep(self.length, 0, [], 0, token(self.length))
            self.emitted += 1
        self._give(start, count, step)

    def verify(self, drafted: int, accepted: int) -> None:
        accepted = min(accepted, drafted)
        position = self.length
        good = [token(position + i) for i in range(accepted)]
        bad = [7] * (drafted - accepted)
        step = VerifyStep(position, 0, good + bad, accepted, token(position + accepted))
        start = self.computed
        self.emitted += accepted + 1
        self.computed += accepted + 1
        self._give(start, accepted + 1, step)

    def preempt(self, cached: int) -> None:
        self.computed = min(cached, self.computed)

    def exchange_target(self) -> None:
        """New weights: everything is computed again."""
        self.version += 1
        span = self.builder.retarget(self.version)
        if span is not None:
            self.spans.append(span)
        self.computed = 0

    def finish(self) -> list[Span]:
        last = self.builder.flush(final=True)
        return [*self.spans, *([last] if last else [])]


actions = st.lists(
    st.one_of(
        st.tuples(st.just("verify"), st.integers(0, 4), st.integers(0, 4)),
        st.tuples(st.just("preempt"), st.integers(0, 30), st.integers(1, 9)),
        st.tuples(st.just("exchange"), st.booleans(), st.integers(1, 9)),
    ),
    max_size=25,
)


@given(
    prompt=st.integers(1, 20),
    cached=st.integers(0, 19),
    chunk=st.integers(1, 9),
    script=actions,
    max_tokens=st.integers(1, 40),
)
def test_spans_hold_every_position_once_and_every_emitted_token_in_order(
    prompt, cached, chunk, script, max_tokens
):
    engine = Engine(builder(prompt, max_tokens), prompt, computed=min(cached, prompt - 1))
    first = engine.computed
    while engine.computed < engine.length:
        engine.read(chunk)
        if engine.emitted:
            break
    for name, a, b in script:
        if name == "verify":
            engine.verify(a, b)
        else:
            if name == "preempt":
                engine.preempt(a)
            else:
                engine.exchange_target()
                if a:  # and again, half-way through
                    engine.read(b)
                    engine.exchange_target()
            while engine.computed < engine.length - 1:
                engine.read(b)
                if engine.computed == engine.length - 1:
                    break
    spans = engine.finish()
    emitted = [i for span in spans for i in span.trace.emitted_ids()]
    assert emitted == [token(prompt + i) for i in range(engine.emitted)]
    covered = [int(p) for span in spans for p in span.tensors[-1].tolist()]
    assert covered == list(range(first, engine.length - 1))
    for index, span in enumerate(spans):
        check_trace(span.trace)
        assert span.trace.span_index == index
        assert set(span.tensors[0][:, 2].tolist()) == {span.trace.target_version}
        start = span.trace.first_position
        assert span.trace.token_ids == [token(start + i) for i in range(len(span.trace.token_ids))]
        assert span.tensors[0][:, 0].tolist() == list(
            range(start, start + span.tensors[0].shape[0])
        )


@given(cut=st.integers(0, 12), accepted=st.lists(st.integers(0, 3), min_size=1, max_size=4))
def test_a_trimmed_span_ends_where_the_response_ended(cut, accepted):
    engine = Engine(builder(4), 4)
    engine.read(4)
    for count in accepted:
        engine.verify(3, count)
    (span,) = engine.finish()
    total = span.trace.emitted_ids()
    trimmed = trim(span, 4 + cut)
    assert trimmed is not None
    check_trace(trimmed.trace)
    assert trimmed.trace.emitted_ids() == total[:cut]
    assert all(t.shape[0] <= len(trimmed.trace.token_ids) for t in trimmed.tensors)


def test_a_span_survives_the_wire():
    engine = Engine(builder(3), 3)
    engine.read(3)
    engine.verify(3, 2)
    (span,) = engine.finish()
    frames = [encode(span.trace), *span.frames()]
    trace = decode_trace(frames)
    assert trace == span.trace
    last = torch.frombuffer(bytearray(frames[1]), dtype=torch.float32).view(-1, 3)
    assert torch.equal(last, span.tensors[0])


def test_a_step_that_does_not_follow_the_tokens_is_refused():
    b = builder(3)
    b.observe(0, [1, 2, 3], rows(0, 3), VerifyStep(3, 0, [], 0, 9))
    with pytest.raises(RecordError):
        b.observe(3, [9], rows(3, 1), VerifyStep(6, 0, [], 0, 9))
