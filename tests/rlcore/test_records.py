"""Records survive the wire; whatever else arrives is a RecordError, found before anything is allocated."""

from __future__ import annotations

import contextlib
import math
import tracemalloc

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlcore.records import engine_link, learner_link, trace
from rlcore.records.acceptance import AcceptanceCount
from rlcore.records.engine_link import (
    MAX_SHARES,
    CaptureCounts,
    CoresSpared,
    EngineReport,
    ForgetTenant,
    RequestEnd,
    ShareCount,
    SpeculationReport,
    decode_engine_message,
)
from rlcore.records.learner_link import (
    Announce,
    DraftFiles,
    FetchDraft,
    FetchTarget,
    Hello,
    LearnerReport,
    Purge,
    PurgeCounts,
    Purged,
    Retreat,
    TargetTensors,
    Verdict,
    decode_learner_message,
)
from rlcore.records.trace import MAX_SPAN_TOKENS, Sampling, VerifyStep, VerifyTrace, decode_trace
from rlcore.records.versions import DraftManifest
from rlcore.records.wire import DTYPE_BYTES, MAX_HEADER_BYTES, RecordError, TensorSpec, encode

MESSAGES = {
    decode_engine_message: (EngineReport, SpeculationReport, RequestEnd, CoresSpared, ForgetTenant),
    decode_learner_message: (
        Hello,
        LearnerReport,
        Announce,
        Retreat,
        FetchDraft,
        DraftFiles,
        Verdict,
        FetchTarget,
        TargetTensors,
        Purge,
        Purged,
    ),
}

names = st.text(max_size=12)
integers = st.integers(-(2**63), 2**63 - 1)
counts = st.integers(0, 2**63 - 1)
numbers = st.floats(allow_nan=False)
tables = st.dictionaries(names, integers, max_size=3)
manifests = st.builds(
    DraftManifest, version=integers, parent=st.none() | integers, method=names, sha256=names,
    target_id=names, target_version=integers, origin=names, created=numbers, tokens_seen=integers,
    heldout_length=st.none() | numbers, heldout_rates=st.lists(numbers, max_size=4).map(tuple),
    gain_lower=st.none() | numbers,
)  # fmt: skip
acceptances = st.builds(
    AcceptanceCount, version=integers, steps=integers, plain_steps=integers, emitted=integers,
    drafted=st.lists(integers, max_size=4), accepted=st.lists(integers, max_size=4),
)  # fmt: skip
messages = {
    Retreat: st.builds(Retreat, version=integers, to=integers, reason=names),
    EngineReport: st.builds(
        EngineReport, worker=names, live_version=integers, speculative_tokens=integers,
        acceptance=st.lists(acceptances, max_size=3),
        capture=st.builds(CaptureCounts, captured=integers, sent=integers, dropped=tables),
        tenants=st.lists(
            st.builds(ShareCount, name=names, steps=counts, emitted=counts, traces=counts),
            max_size=3,
        ),
    ),
    SpeculationReport: st.builds(
        SpeculationReport, scheduler=names, drafts_now=counts, decode_steps=counts, drafts=counts,
        tokens=counts, seconds=st.floats(0, 1e9), plain_seconds=st.floats(0, 1e9),
        unknown_seconds=st.floats(0, 1e9), running=counts, waiting=counts,
    ),
    RequestEnd: st.builds(
        RequestEnd, request_id=names, output_tokens=counts, tenant=names, learn=st.booleans(),
        ended=st.floats(0, 1e10),
    ),
    ForgetTenant: st.builds(ForgetTenant, tenant=names),
    CoresSpared: st.builds(CoresSpared, cores=counts),
    Hello: st.builds(
        Hello, target_id=names, target_version=integers, method=names, speculative_tokens=integers,
        live_version=integers, last_version=integers,
        replay_shares=st.dictionaries(names, st.floats(0.01, 1), max_size=3),
    ),
    Purge: st.builds(Purge, purge_id=names, tenant=names, until=st.floats(0, 1e10)),
    Purged: st.builds(
        Purged, purge_id=names, error=st.none() | names,
        deleted=st.builds(PurgeCounts, counts, counts, counts, counts),
    ),
    LearnerReport: st.builds(
        LearnerReport, pid=integers, phase=names, received=integers, rejected=tables,
        loss=st.none() | numbers, heldout_length=st.none() | numbers, tokens_per_second=numbers,
    ),
    Announce: st.builds(Announce, manifest=manifests),
    FetchDraft: st.builds(FetchDraft, version=integers),
    DraftFiles: st.builds(
        DraftFiles, version=integers, names=st.lists(names, max_size=3),
        sizes=st.lists(counts, max_size=3), error=st.none() | names,
    ),
    FetchTarget: st.builds(FetchTarget, version=integers),
    TargetTensors: st.builds(
        TargetTensors, version=integers, error=st.none() | names,
        tensors=st.lists(
            st.builds(TensorSpec, name=names, dtype=st.sampled_from(["float32", "bfloat16"]),
                      shape=st.tuples(counts, counts)),
            max_size=3,
        ),
    ),
    Verdict: st.builds(
        Verdict, version=integers, live=st.booleans(), live_version=integers,
        error=st.none() | names,
    ),
}  # fmt: skip
decoders = {kind: decode for decode, kinds in MESSAGES.items() for kind in kinds}

tokens = st.integers(0, 2**31 - 1)


@st.composite
def traces(draw) -> tuple[VerifyTrace, list[bytes]]:
    """A trace whose parts agree, and its frames."""
    first = draw(st.integers(0, 2**30))
    context = draw(st.lists(tokens, min_size=1, max_size=5))
    token_ids, steps = list(context), []
    for _ in range(draw(st.integers(0, 4))):
        drafts = draw(st.lists(tokens, max_size=4))
        accepted = draw(st.integers(0, len(drafts)))
        step = VerifyStep(
            position=first + len(token_ids), draft_version=draw(integers), draft_ids=drafts,
            accepted=accepted, replacement=draw(tokens),
            draft_logprobs=draw(st.lists(numbers, max_size=4)),
        )  # fmt: skip
        steps.append(step)
        token_ids += [*drafts[:accepted], step.replacement]
    rows = draw(st.integers(0, len(token_ids)))
    dtype = draw(st.sampled_from(sorted(DTYPE_BYTES)))
    width = draw(st.integers(0, 6))
    specs = [TensorSpec("last", dtype, (rows, width)), TensorSpec("logsumexp", "float32", (rows,))]
    if draw(st.booleans()):
        specs.insert(0, TensorSpec("aux", dtype, (rows, 3 * width)))
    trace = VerifyTrace(
        request_id=draw(names), tenant=draw(names), target_version=draw(integers),
        span_index=draw(counts), final=draw(st.booleans()), first_position=first,
        prompt_length=draw(st.integers(0, first + len(context))), prompt_hash=draw(names),
        token_ids=token_ids, sampling=Sampling(draw(numbers), draw(numbers), draw(integers)),
        grammar=draw(st.booleans()), steps=steps, tensors=specs, adapter=draw(names),
    )  # fmt: skip
    return trace, [draw(st.binary(min_size=s.nbytes, max_size=s.nbytes)) for s in specs]


def a_trace(**changes) -> VerifyTrace:
    """Prompt 10, 11; then draft 12 accepted and 14 in place of 13."""
    trace = VerifyTrace(
        request_id="r", tenant="t", target_version=0, span_index=0, final=True, first_position=5,
        prompt_length=7, prompt_hash="h", token_ids=[10, 11, 12, 14], sampling=Sampling(),
        grammar=False, steps=[VerifyStep(7, 1, [12, 13], 1, 14)],
        tensors=[TensorSpec("last", "float32", (2, 3))],
    )  # fmt: skip
    return msgspec.structs.replace(trace, **changes)


def frames_of(trace: VerifyTrace) -> list[bytes]:
    return [encode(trace), *(bytes(spec.nbytes) for spec in trace.tensors)]


def refused(frames, reason: str) -> None:
    with pytest.raises(RecordError) as caught:
        decode_trace(frames)
    assert caught.value.reason == reason


# --- round trips -------------------------------------------------------------------------------


def test_a_trace_recorded_before_there_were_adapters_is_still_read():
    trace = a_trace()
    old = msgspec.to_builtins(trace)
    del old["adapter"]
    frames = [msgspec.msgpack.encode(old), *frames_of(trace)[1:]]
    assert decode_trace(frames) == trace
    assert trace.adapter == ""


def test_every_message_kind_is_covered_here():
    tagged = {
        kind for module in (engine_link, learner_link, trace) for kind in vars(module).values()
        if isinstance(kind, type) and issubclass(kind, msgspec.Struct) and kind is not msgspec.Struct
        and kind.__struct_config__.tag is not None
    }  # fmt: skip
    assert tagged == {*messages, VerifyTrace}


@pytest.mark.parametrize("kind", messages, ids=lambda kind: kind.__name__)
@given(data=st.data())
@settings(max_examples=40, deadline=None)
def test_a_message_survives_the_wire(kind, data):
    message = data.draw(messages[kind])
    assert decoders[kind](encode(message)) == message
    assert decoders[kind](memoryview(encode(message))) == message


@given(made=traces())
def test_a_trace_survives_the_wire(made):
    trace, frames = made
    assert decode_trace([encode(trace), *frames]) == trace
    assert decode_trace([memoryview(encode(trace)), *map(memoryview, frames)]) == trace


# --- everything else is a RecordError ----------------------------------------------------------


@given(st.binary(max_size=200))
def test_garbage_is_a_record_error(content):
    for decode in (decode_engine_message, decode_learner_message, lambda c: decode_trace([c])):
        with pytest.raises(RecordError):
            decode(content)


json_like = st.recursive(
    st.none() | st.booleans() | integers | numbers | st.text(max_size=5) | st.binary(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4)
    ),
    max_leaves=12,
)


@given(
    fields=st.dictionaries(st.sampled_from(VerifyTrace.__struct_fields__), json_like, max_size=15),
    kind=st.sampled_from(["trace", "hello", "request_end", "?"]),
)
def test_well_formed_msgpack_of_the_wrong_schema_is_a_record_error(fields, kind):
    content = msgspec.msgpack.encode({"kind": kind, **fields})
    for decode in (decode_engine_message, decode_learner_message, lambda c: decode_trace([c])):
        with pytest.raises(RecordError):
            decode(content)


@given(made=traces(), data=st.data())
def test_a_damaged_header_never_raises_anything_else(made, data):
    trace, frames = made
    header = bytearray(encode(trace))
    for _ in range(data.draw(st.integers(1, 3))):
        header[data.draw(st.integers(0, len(header) - 1))] = data.draw(st.integers(0, 255))
    cut = data.draw(st.integers(0, len(header)))
    for content in (bytes(header), bytes(header[:cut])):
        with contextlib.suppress(RecordError):
            decode_trace([content, *frames])


def test_deep_nesting_is_a_record_error():
    refused([b"\x91" * 100_000], "malformed")


def test_an_oversized_header_is_refused_unread():
    header = encode(a_trace()) + bytes(MAX_HEADER_BYTES)
    tracemalloc.start()
    for decode in (decode_engine_message, decode_learner_message, lambda c: decode_trace([c])):
        with pytest.raises(RecordError) as caught:
            decode(header)
        assert caught.value.reason == "oversized"
    assert tracemalloc.get_traced_memory()[1] < 1_000_000
    tracemalloc.stop()


@pytest.mark.parametrize("schema", [0, 2, -1])
def test_another_schema_version_is_refused(schema):
    refused(frames_of(a_trace(schema=schema)), "schema")
    for decode, message in (
        (decode_engine_message, RequestEnd("r", 1, schema=schema)),
        (decode_learner_message, FetchDraft(1, schema=schema)),
    ):
        with pytest.raises(RecordError) as caught:
            decode(encode(message))
        assert caught.value.reason == "schema"


def test_a_message_of_the_other_link_is_refused():
    for decode, message in (
        (decode_engine_message, FetchDraft(1)),
        (decode_learner_message, RequestEnd("r", 1)),
        (lambda content: decode_trace([content]), FetchDraft(1)),
    ):
        with pytest.raises(RecordError):
            decode(encode(message))


def test_no_frames_at_all_are_refused():
    refused([], "malformed")


@given(change=st.integers(-24, 40).filter(bool))
def test_a_frame_of_another_size_than_announced_is_refused(change):
    refused([encode(a_trace()), bytes(24 + change)], "frames")


@pytest.mark.parametrize("extra", [-1, 1, 5])
def test_another_number_of_frames_than_announced_is_refused(extra):
    frames = frames_of(a_trace())
    refused(frames[:extra] if extra < 0 else [*frames, *[bytes(24)] * extra], "frames")


@pytest.mark.parametrize(
    "shape", [(2, 2**59), (4, 2**62), (2, 2**63 - 1), (2**60, 1), (2**31, 2**31)], ids=str
)
def test_a_huge_shape_is_refused_without_allocating(shape):
    frames = [encode(a_trace(tensors=[TensorSpec("last", "float32", shape)])), bytes(24)]
    tracemalloc.start()
    with pytest.raises(RecordError):
        decode_trace(frames)
    assert tracemalloc.get_traced_memory()[1] < 1_000_000
    tracemalloc.stop()


def test_a_shape_whose_size_wraps_around_is_refused():
    """2^62 * 4 bytes is 0 in 64 bits."""
    refused([encode(a_trace(tensors=[TensorSpec("last", "float32", (1, 2**62))])), b""], "frames")


def test_more_tokens_than_a_span_may_have_are_refused():
    longest = a_trace(token_ids=[0] * MAX_SPAN_TOKENS, steps=[])
    assert len(decode_trace(frames_of(longest)).token_ids) == MAX_SPAN_TOKENS
    refused(frames_of(a_trace(token_ids=[0] * (MAX_SPAN_TOKENS + 1), steps=[])), "malformed")


@pytest.mark.parametrize(
    "tensors",
    [
        [TensorSpec("other", "float32", (2, 3))],
        [TensorSpec("last", "float32", (2, 3))] * 2,
        [TensorSpec("last", "float64", (2, 3))],
        [TensorSpec("last", "int8", (2, 3))],
        [TensorSpec("last", "float32", (2,))],
        [TensorSpec("last", "float32", ())],
        [TensorSpec("last", "float32", (2, 3, 1))],
        [TensorSpec("logsumexp", "float32", (2, 1))],
        [TensorSpec("last", "float32", (5, 3))],
        [TensorSpec("last", "float32", (2, 3)), TensorSpec("logsumexp", "float32", (1,))],
    ],
    ids=str,
)
def test_tensors_that_do_not_fit_the_span_are_refused(tensors):
    trace = a_trace(tensors=tensors)
    frames = [encode(trace), *(bytes(24) for _ in tensors)]
    refused(frames, "tensors")


@pytest.mark.parametrize(
    "steps",
    [
        [VerifyStep(7, 1, [12], 2, 14)],
        [VerifyStep(7, 1, [12, 13], 1, 15)],
        [VerifyStep(7, 1, [99, 13], 1, 14)],
        [VerifyStep(8, 1, [12, 13], 1, 14)],
        [VerifyStep(6, 1, [11, 13], 1, 12)],
        [VerifyStep(4, 1, [], 0, 10)],
        [VerifyStep(2**31 - 1, 1, [], 0, 14)],
        [VerifyStep(7, 1, [12, 14, 15], 3, 16)],
        [VerifyStep(7, 1, [12, 13], 1, 14), VerifyStep(8, 1, [], 0, 14)],
        [VerifyStep(8, 1, [], 0, 14), VerifyStep(7, 1, [], 0, 12)],
    ],
    ids=[
        "more accepted than drafted", "another replacement", "another accepted draft",
        "behind the tokens", "in the prompt", "before the span", "far outside", "past the end",
        "overlapping", "backwards",
    ],
)  # fmt: skip
def test_steps_that_disagree_with_the_tokens_are_refused(steps):
    decode_trace(frames_of(a_trace()))
    refused(frames_of(a_trace(steps=steps)), "steps")


def test_steps_within_the_prompt_of_a_cached_span_are_refused():
    trace = a_trace(prompt_length=8)
    refused(frames_of(trace), "steps")


def test_a_step_that_accepts_more_than_was_drafted_is_refused_though_its_tokens_agree():
    trace = a_trace(token_ids=[10, 11, 12, 14, 15], steps=[VerifyStep(7, 1, [12], 2, 14)])
    refused(frames_of(trace), "steps")


@pytest.mark.parametrize("field", ["first_position", "prompt_length"])
def test_a_position_that_no_tensor_of_indices_holds_is_refused(field):
    refused(frames_of(a_trace(**{field: 2**31})), "malformed")


def test_a_report_names_a_bounded_number_of_tenants():
    def report(names: int) -> bytes:
        shares = [ShareCount(f"{i}") for i in range(names)]
        return encode(EngineReport("w", 1, 3, [], CaptureCounts(), tenants=shares))

    decoded = decode_engine_message(report(MAX_SHARES))
    assert isinstance(decoded, EngineReport)
    assert len(decoded.tenants) == MAX_SHARES
    with pytest.raises(RecordError, match="malformed"):
        decode_engine_message(report(MAX_SHARES + 1))


@pytest.mark.parametrize("seconds", [-1.0, math.nan])
def test_a_scheduler_that_reports_negative_time_is_refused(seconds):
    report = SpeculationReport("s", 3, 10, 30, 25, seconds, 2.0, 0.0)
    with pytest.raises(RecordError, match="malformed"):
        decode_engine_message(encode(report))
