"""What server and learner tell each other."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from rlcore.records.versions import DraftManifest
from rlcore.records.wire import SCHEMA_VERSION, Count, Id, TensorSpec, decode


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


LearnerMessage = (
    Hello | LearnerReport | Announce | Retreat | FetchDraft | DraftFiles | Verdict
    | FetchTarget | TargetTensors | Purge | Purged
)  # fmt: skip

_decoder = msgspec.msgpack.Decoder(LearnerMessage)


def decode_learner_message(header: bytes | memoryview) -> LearnerMessage:
    """Raises RecordError."""
    return decode(_decoder, header)
