"""What a server's own routes answer, as typed records. Fields that a newer server adds are ignored."""

from __future__ import annotations

from typing import Any

import msgspec
from openai import BaseModel

from rlcore.records.acceptance import AcceptanceCount
from rlcore.records.engine_link import CaptureCounts
from rlcore.records.learner_link import PurgeCounts
from rlcore.records.versions import DraftManifest


class Acceptance(AcceptanceCount):
    """``length`` (tokens emitted per drafted step) and ``rates`` are computed of the counts."""


class TargetStatus(msgspec.Struct, kw_only=True):
    id: str
    version: int


class DraftStatus(msgspec.Struct, kw_only=True):
    live: int
    previous: int | None
    origin: str
    method: str
    speculative_tokens: int
    collapsed: bool = False


class AcceptanceTotal(msgspec.Struct, kw_only=True):
    """Over all versions."""

    steps: int
    plain_steps: int
    emitted: int


class AcceptanceStatus(msgspec.Struct, kw_only=True):
    total: AcceptanceTotal
    live: Acceptance | None = None
    previous: Acceptance | None = None


class LearnerStatus(msgspec.Struct, kw_only=True):
    """``age_s``: seconds since its last report; the rest is of that report."""

    alive: bool
    age_s: float | None = None
    phase: str = ""
    computing: bool = False
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
    tokens_per_second: float = 0.0


class LiveChange(msgspec.Struct, kw_only=True):
    """The live draft changed from ``before`` to ``version``; ``time`` in seconds since the epoch."""

    time: float
    version: int
    before: int
    cause: str
    """``promoted``, ``chosen`` or ``rolled_back``."""
    reason: str = ""


class PolicySwap(msgspec.Struct, kw_only=True):
    """A version of the target that went live; times in seconds."""

    version: int
    sha256: str
    at: float
    stall_seconds: float
    apply_seconds: float
    stage_seconds: float
    frozen_requests: int
    frozen_tokens: int


class SwapStatus(msgspec.Struct, kw_only=True):
    count: int
    failed: dict[str, int] = {}
    last_seconds: float | None = None


class PolicySwapStatus(msgspec.Struct, kw_only=True):
    count: int
    failed: dict[str, int] = {}
    last: PolicySwap | None = None


class RollbackStatus(msgspec.Struct, kw_only=True):
    count: int
    last: LiveChange | None = None


class CoresStatus(msgspec.Struct, kw_only=True):
    """Of the model, on a CPU; all 0 where the server does not set them."""

    usable: int
    allotted: int
    threads: int
    """In the status: at the engine's last report."""


class Status(msgspec.Struct, kw_only=True):
    """``GET /v1/paceline/status``."""

    target: TargetStatus
    draft: DraftStatus
    acceptance: AcceptanceStatus
    cores: CoresStatus
    learner: LearnerStatus
    traces: CaptureCounts
    swaps: SwapStatus
    policy_swaps: PolicySwapStatus
    rollbacks: RollbackStatus
    uptime_s: float


class Draft(DraftManifest, frozen=True, kw_only=True):
    """One version: its manifest, its acceptance on live traffic, and why it was rolled back if it was."""

    acceptance: Acceptance | None = None
    rolled_back: str | None = None


class DamagedDraft(msgspec.Struct, kw_only=True):
    """A version whose manifest cannot be read."""

    version: int
    error: str


class Drafts(msgspec.Struct, kw_only=True):
    """``GET /v1/paceline/drafts``."""

    live: int
    previous: int | None
    drafts: list[Draft]
    damaged: list[DamagedDraft] = []


class Changes(msgspec.Struct, kw_only=True):
    """``GET /v1/paceline/history``, oldest first."""

    changes: list[LiveChange]


class Activated(msgspec.Struct, kw_only=True):
    """A draft version was made live; the engine stood still for ``seconds``."""

    live: int
    previous: int | None
    seconds: float


class Purged(msgspec.Struct, kw_only=True):
    """All that was kept of a tenant's traffic is gone; ``deleted`` counts it."""

    tenant: str
    deleted: PurgeCounts


class PolicyState(msgspec.Struct, kw_only=True):
    """``GET /v1/paceline/policy``; ``swaps`` since the server's start, oldest first."""

    live: int
    sha256: str
    swaps: list[PolicySwap]
    failed: dict[str, int] = {}


class PacelineUsage(msgspec.Struct, kw_only=True):
    """``usage.paceline`` of a response: what each draft version did for it, and who sampled its tokens."""

    versions: list[Acceptance] = []
    policy_versions: list[list[tuple[int, int]]] = []
    """For each choice: (index of the first output token, policy version) pairs."""

    @property
    def accepted(self) -> int:
        """Draft tokens accepted."""
        return sum(sum(count.accepted) for count in self.versions)

    @property
    def length(self) -> float | None:
        """Acceptance length over all versions; None when nothing was drafted."""
        steps = sum(count.steps for count in self.versions)
        return sum(count.emitted for count in self.versions) / steps if steps else None


def usage_of(answer: BaseModel) -> PacelineUsage | None:
    """The account of a completion, a response or a stream's last chunk, if it was asked for.

    Raises ``msgspec.ValidationError`` for one that does not fit.
    """
    extra: dict[str, Any] = answer.to_dict(mode="json", warnings=False)
    holder = extra.get("response") or extra
    account = (holder.get("usage") or {}).get("paceline")
    return None if account is None else msgspec.convert(account, PacelineUsage)
