"""What is known of a version of the draft or of the policy."""

from __future__ import annotations

import msgspec

from rlcore.records.wire import SCHEMA_VERSION


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
