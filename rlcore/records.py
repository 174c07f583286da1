"""The records that cross a process border, and the checks a receiver makes before it allocates.

Wire form of a message is a list of frames. Frame 0 is a msgpack header (one of the tagged structs
below); the frames after it are raw tensor bytes, in the order of ``header.tensors``, sent without a
copy. Nothing here is pickled and nothing here imports torch: shapes and sizes are compared with
arithmetic first, and only then does a receiver view the bytes.

Positions are absolute: position 0 is the first prompt token. A span that starts after a prefix-cache
hit keeps its absolute first position.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import zip_longest
from typing import Annotated, ClassVar

import msgspec
from msgspec import Meta

SCHEMA_VERSION = 1

MAX_HEADER_BYTES = 8 * 1024 * 1024
"""A header holds token ids and steps only; 8 MiB is far above the longest allowed span."""

MAX_SPAN_TOKENS = 65_536
"""Longest span that a receiver accepts, in tokens."""

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}

Id = Annotated[str, Meta(max_length=256)]
TokenId = Annotated[int, Meta(ge=0, le=2**31 - 1)]
Count = Annotated[int, Meta(ge=0)]
Position = Annotated[int, Meta(ge=0, le=2**31 - 1)]


class RecordError(ValueError):
    """A message that does not fit the schema. ``reason`` is a short word, used as a metric label."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(f"{reason}: {detail}")
        self.reason = reason


class TensorSpec(msgspec.Struct, frozen=True, array_like=True):
    """Name, dtype and shape of one tensor frame."""

    name: Id
    dtype: Annotated[str, Meta(max_length=16)]
    shape: Annotated[tuple[Count, ...], Meta(max_length=4)]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * DTYPE_BYTES[self.dtype]


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


class DraftManifest(msgspec.Struct, frozen=True):
    """Everything known of one draft version. It lies beside the weights as ``manifest.json``."""

    version: int
    parent: int | None
    method: str
    """How the engine loads it: ``eagle3`` or ``draft_model``."""
    sha256: str
    """Of ``model.safetensors``."""
    target_id: str
    target_version: int
    origin: str
    """Where it came from: ``untrained``, ``shipped``, ``given`` or ``learned``."""
    created: float = 0.0
    """Seconds since the epoch."""
    tokens_seen: int = 0
    """Trained positions, repeats counted, up to this version."""
    updates: int = 0
    heldout_tokens: int = 0
    heldout_length: float | None = None
    """Estimated acceptance length (bonus token included) on held-out traffic at publication."""
    heldout_rates: tuple[float, ...] = ()
    """Conditional acceptance by position on held-out traffic."""
    parent_length: float | None = None
    """The parent's estimated acceptance length on those same traces."""
    gain_lower: float | None = None
    """95 % lower bound of the paired gain in acceptance length over the parent."""
    trained_share: float = 1.0
    """Share of the trained weights; the rest are the parent's."""
    schema: int = SCHEMA_VERSION


class PolicyManifest(msgspec.Struct, frozen=True):
    """Everything known of one policy version. It lies beside the weights as ``manifest.json``."""

    version: int
    """Optimizer updates that made it."""
    parent: int | None
    sha256: str
    """Of ``model.safetensors``."""
    base_id: str
    """The model that the run began with."""
    created: float = 0.0
    """Seconds since the epoch."""
    tokens_seen: int = 0
    """Sampled tokens trained on up to this version."""
    lora_rank: int = 0
    """Of an adapter of the base; 0: the weights are the whole model's."""
    schema: int = SCHEMA_VERSION


class AcceptanceCount(msgspec.Struct):
    """Verified drafts of one version, counted by draft position (index 0 is the first draft)."""

    version: int
    steps: int = 0
    """Verification steps in which at least one draft was verified."""
    plain_steps: int = 0
    """Decode steps without a draft."""
    emitted: int = 0
    """Tokens emitted by the ``steps`` above, bonus token included."""
    drafted: list[int] = []
    accepted: list[int] = []

    def observe(self, k: int, accepted: int) -> None:
        if k == 0:
            self.plain_steps += 1
            return
        grow = k - len(self.drafted)
        if grow > 0:
            self.drafted.extend([0] * grow)
            self.accepted.extend([0] * grow)
        self.steps += 1
        self.emitted += accepted + 1
        for i in range(k):
            self.drafted[i] += 1
        for i in range(accepted):
            self.accepted[i] += 1

    def plus(self, other: AcceptanceCount) -> AcceptanceCount:
        """Both counts of one version together."""
        return AcceptanceCount(
            self.version,
            self.steps + other.steps,
            self.plain_steps + other.plain_steps,
            self.emitted + other.emitted,
            _sums(self.drafted, other.drafted),
            _sums(self.accepted, other.accepted),
        )

    @property
    def length(self) -> float | None:
        """Acceptance length: tokens per step in which something was drafted, bonus included."""
        return self.emitted / self.steps if self.steps else None

    @property
    def rates(self) -> list[float]:
        """Conditional acceptance by position: accepted at i, given that i was reached."""
        reached = [self.steps, *self.accepted]
        return [a / r if r else 0.0 for a, r in zip(self.accepted, reached, strict=False)]


class AdapterAcceptance(msgspec.Struct):
    """What was accepted of the drafts for one LoRA adapter."""

    adapter: Id
    total: AcceptanceCount
    """Of all draft versions; its version is -1."""
    versions: list[AcceptanceCount] = []
    """Of the last few, oldest first."""


def _sums(first: list[int], second: list[int]) -> list[int]:
    """Element by element; the shorter one is filled up with zeros."""
    return [a + b for a, b in zip_longest(first, second, fillvalue=0)]


# --- engine <-> server -------------------------------------------------------------------------


class CaptureCounts(msgspec.Struct):
    """What became of captured spans, in total since the worker started."""

    captured: int = 0
    sent: int = 0
    dropped: dict[str, int] = {}

    def plus(self, other: CaptureCounts) -> CaptureCounts:
        """Both together."""
        reasons = self.dropped.keys() | other.dropped.keys()
        return CaptureCounts(
            self.captured + other.captured,
            self.sent + other.sent,
            {r: self.dropped.get(r, 0) + other.dropped.get(r, 0) for r in sorted(reasons)},
        )


OTHER_SHARES = "(other)"
"""The name of all that are not counted each by itself; no tenant can have it."""

MAX_SHARES = 256
"""Names in a report; the engine names fewer."""


class ShareCount(msgspec.Struct):
    """What one tenant, or one adapter, has had so far."""

    name: Id
    steps: Count = 0
    """Steps of its ended requests in which drafts were verified."""
    emitted: Count = 0
    """Tokens that those steps emitted."""
    traces: Count = 0
    """Spans sent to the learner."""


ShareCounts = Annotated[list[ShareCount], Meta(max_length=MAX_SHARES)]


class EngineReport(msgspec.Struct, tag="engine_report", tag_field="kind"):
    """The worker's counters, pushed once a second; totals since the worker started."""

    worker: Id
    live_version: int
    speculative_tokens: int
    acceptance: list[AcceptanceCount]
    capture: CaptureCounts
    threads: Count = 0
    """The model computes with at present; 0 where the engine does not set them."""
    running: Count = 0
    """Requests in the engine that have begun and not ended."""
    adapters: list[AdapterAcceptance] = []
    """Named LoRA adapters only; ``acceptance`` counts their requests too."""
    tenants: ShareCounts = []
    schema: int = SCHEMA_VERSION


Seconds = Annotated[float, Meta(ge=0)]


class SpeculationReport(msgspec.Struct, tag="speculation_report", tag_field="kind"):
    """The scheduler's figures, pushed once a second; totals since its start (``rlcore.speculation.gain``)."""

    scheduler: Id
    drafts_now: Count
    """Asked for in the newest step that decoded."""
    decode_steps: Count
    drafts: Count
    """Summed over the decode steps."""
    tokens: Count
    """Emitted by the decode steps."""
    seconds: Seconds
    """Measured, of the steps that can be compared."""
    plain_seconds: Seconds
    """Estimated for the same work without speculation."""
    unknown_seconds: Seconds
    """Measured, of the steps that cannot be compared."""
    running: Count = 0
    waiting: Count = 0
    schema: int = SCHEMA_VERSION


class RequestEnd(msgspec.Struct, tag="request_end", tag_field="kind"):
    """The server's word on how many tokens a request's response really returned.

    The engine may have run past a stop string or an abort; the capture thread trims to this count.
    """

    request_id: Id
    output_tokens: Count
    tenant: Id = "default"
    learn: bool = True
    ended: float = 0.0
    """Seconds since the epoch."""
    schema: int = SCHEMA_VERSION


class CoresSpared(msgspec.Struct, tag="cores_spared", tag_field="kind"):
    """The server's word on how many cores the model leaves to others for the time being."""

    cores: Count
    schema: int = SCHEMA_VERSION


class ForgetTenant(msgspec.Struct, tag="forget_tenant", tag_field="kind"):
    """The server's word that no span of a tenant that the engine still holds is to be sent."""

    tenant: Id
    schema: int = SCHEMA_VERSION


# --- server <-> learner ------------------------------------------------------------------------


class Hello(msgspec.Struct, tag="hello", tag_field="kind"):
    """A server introduces itself, on connecting and every few seconds after."""

    target_id: str
    target_version: int
    method: str
    speculative_tokens: int
    live_version: int
    live_sha256: str
    """Digest of the live weights: a version number alone could be another home's."""
    last_version: int
    """The highest version number in the server's store; new ones count on from there."""
    target_sha256: str = ""
    """Of a target version that was published to the server; empty for its own target."""
    rest: bool = False
    """The learner is not to compute for the time being: its cores are needed."""
    replay_shares: dict[Id, Annotated[float, Meta(gt=0, le=1)]] = {}
    """The most that a tenant may be of what is learned from; those that may be everything are not in it."""
    schema: int = SCHEMA_VERSION


class LearnerReport(msgspec.Struct, tag="learner_report", tag_field="kind"):
    """The learner's heartbeat; counters are totals that survive its restart."""

    pid: int
    phase: str
    computing: bool = False
    """Whether it trains or judges, or waits."""
    received: int = 0
    rejected: dict[str, int] = {}
    replay_tokens: int = 0
    heldout_tokens: int = 0
    tokens_seen: int = 0
    updates: int = 0
    loss: float | None = None
    heldout_length: float | None = None
    live_length: float | None = None
    published: int = 0
    judged: int = 0
    rolled_back: int = 0
    drifts: int = 0
    lr_scale: float = 1.0
    """Share of the learning rates that is in use."""
    publish_interval_s: float = 0.0
    pace: str = ""
    """Why they are what they are."""
    tokens_per_second: float = 0.0
    schema: int = SCHEMA_VERSION


class Announce(msgspec.Struct, tag="announce", tag_field="kind"):
    """A version that passed the learner's gate and can be fetched."""

    manifest: DraftManifest
    schema: int = SCHEMA_VERSION


class Retreat(msgspec.Struct, tag="retreat", tag_field="kind"):
    """The live version proved worse than another one on live traffic: go back to that."""

    version: int
    """The worse one; the server acts only while it is live."""
    to: int
    reason: str
    schema: int = SCHEMA_VERSION


class FetchDraft(msgspec.Struct, tag="fetch_draft", tag_field="kind"):
    """Either side asks the other for the files of one version."""

    version: int
    schema: int = SCHEMA_VERSION


class DraftFiles(msgspec.Struct, tag="draft_files", tag_field="kind"):
    """Answer to FetchDraft; the files' bytes follow as frames, in the order of ``names``.

    ``error`` is set, and no frames follow, when the version cannot be had.
    """

    version: int
    names: list[Id] = []
    sizes: list[Count] = []
    error: str | None = None
    schema: int = SCHEMA_VERSION


class FetchTarget(msgspec.Struct, tag="fetch_target", tag_field="kind"):
    """The learner asks a server for what it needs of the live version of the target."""

    version: int
    schema: int = SCHEMA_VERSION


class TargetTensors(msgspec.Struct, tag="target_tensors", tag_field="kind"):
    """Answer to FetchTarget; the tensors' bytes follow as frames, in the order of ``tensors``.

    ``embedding`` [V, H], ``final_norm`` [H], and ``lm_head`` [V, H] unless it is the embedding.
    ``error`` is set, and no frames follow, when the version cannot be had.
    """

    version: int
    tensors: list[TensorSpec] = []
    error: str | None = None
    schema: int = SCHEMA_VERSION


class Purge(msgspec.Struct, tag="purge", tag_field="kind"):
    """The order to delete everything of a tenant that ended up to a moment, wherever it is kept.

    It may come again, and is answered each time.
    """

    purge_id: Id
    tenant: Id
    until: Annotated[float, Meta(ge=0)]
    """Seconds since the epoch; traces of responses that ended up to then are refused for ever."""
    schema: int = SCHEMA_VERSION


class PurgeCounts(msgspec.Struct):
    """What a purge has deleted."""

    replay_spans: Count = 0
    """In memory, to be trained on."""
    heldout_spans: Count = 0
    """In memory, to judge by."""
    journal_traces: Count = 0
    """Of the replay on disk."""
    recorded_traces: Count = 0
    """In recordings."""

    def plus(self, other: PurgeCounts) -> PurgeCounts:
        return PurgeCounts(
            self.replay_spans + other.replay_spans,
            self.heldout_spans + other.heldout_spans,
            self.journal_traces + other.journal_traces,
            self.recorded_traces + other.recorded_traces,
        )


class Purged(msgspec.Struct, tag="purged", tag_field="kind"):
    """Answer to Purge, when everything is gone from memory and from the disk; or why it is not."""

    purge_id: Id
    deleted: PurgeCounts
    error: str | None = None
    schema: int = SCHEMA_VERSION


class Verdict(msgspec.Struct, tag="verdict", tag_field="kind"):
    """What the server did with a version that it was told to make live."""

    version: int
    live: bool
    live_version: int
    error: str | None = None
    seconds: float = 0.0
    """The engine stood still for it."""
    schema: int = SCHEMA_VERSION


EngineMessage = EngineReport | SpeculationReport | RequestEnd | CoresSpared | ForgetTenant
LearnerMessage = (
    Hello | LearnerReport | Announce | Retreat | FetchDraft | DraftFiles | Verdict
    | FetchTarget | TargetTensors | Purge | Purged
)  # fmt: skip
Message = VerifyTrace | EngineMessage | LearnerMessage

_encoder = msgspec.msgpack.Encoder()
_trace_decoder = msgspec.msgpack.Decoder(VerifyTrace)
_engine_decoder = msgspec.msgpack.Decoder(EngineMessage)
_learner_decoder = msgspec.msgpack.Decoder(LearnerMessage)


def encode(message: Message) -> bytes:
    """The msgpack header of a message."""
    return _encoder.encode(message)


def _decode(decoder: msgspec.msgpack.Decoder, header: bytes | memoryview):
    if len(header) > MAX_HEADER_BYTES:
        raise RecordError("oversized", f"header of {len(header)} bytes, at most {MAX_HEADER_BYTES}")
    try:
        message = decoder.decode(header)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise RecordError("malformed", str(error)) from None
    if message.schema != SCHEMA_VERSION:
        raise RecordError("schema", f"schema {message.schema}, this side speaks {SCHEMA_VERSION}")
    return message


def decode_engine_message(header: bytes | memoryview) -> EngineMessage:
    """Raises RecordError."""
    return _decode(_engine_decoder, header)


def decode_learner_message(header: bytes | memoryview) -> LearnerMessage:
    """Raises RecordError."""
    return _decode(_learner_decoder, header)


def decode_trace(frames: Sequence[bytes | memoryview]) -> VerifyTrace:
    """The header of a trace message, its frames' sizes checked against it; raises RecordError."""
    if not frames:
        raise RecordError("malformed", "empty message")
    trace: VerifyTrace = _decode(_trace_decoder, frames[0])
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
