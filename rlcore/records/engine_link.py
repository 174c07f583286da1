"""What engine and server tell each other."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from rlcore.records.acceptance import AcceptanceCount, AdapterAcceptance
from rlcore.records.wire import SCHEMA_VERSION, Count, Id, Seconds, decode


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


EngineMessage = EngineReport | SpeculationReport | RequestEnd | CoresSpared | ForgetTenant

_decoder = msgspec.msgpack.Decoder(EngineMessage)


def decode_engine_message(header: bytes | memoryview) -> EngineMessage:
    """Raises RecordError."""
    return decode(_decoder, header)
