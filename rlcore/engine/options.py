"""What the server tells its engine workers, carried in vLLM's ``additional_config``."""

from __future__ import annotations

from typing import Any

import msgspec

from rlcore.settings import Speculation

ADDITIONAL_CONFIG_KEY = "paceline"


class EngineOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Options of the worker and the scheduler. Endpoints are ZeroMQ addresses."""

    target_version: int
    draft_version: int
    draft_rates: list[float]
    """Conditional acceptance by position that is expected of it; empty where nothing is known."""
    speculation: Speculation
    """``adaptive``: as many drafts as pay, up to K; ``fixed``: always K; ``off``: never any."""
    link_endpoint: str
    """Where the server's engine link is bound."""
    trace_endpoint: str | None
    """Where the learner's trace socket is bound; None sends no traces."""
    capture_rate: float
    capture_span_tokens: int
    capture_queue: int
    policy_rank: int = 0
    """Largest rank of the adapters that are the policy's versions; 0: they are whole checkpoints."""
    trace_secret_file: str | None = None
    """This side's CURVE keys for the trace socket, by their file's name: vLLM logs its configuration."""
    trace_server_key_file: str | None = None
    """The learner's public key."""
    cores: int = 0
    """The model may compute on, less those that the server has it spare; 0: not ours to set."""
    allotted: int = 0
    """Of those, how many it computes on to begin with."""

    def to_config(self) -> dict[str, Any]:
        return {ADDITIONAL_CONFIG_KEY: msgspec.to_builtins(self)}

    @classmethod
    def from_config(cls, additional_config: dict[str, Any]) -> EngineOptions:
        return msgspec.convert(additional_config[ADDITIONAL_CONFIG_KEY], cls)
