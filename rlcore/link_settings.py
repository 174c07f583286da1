"""Settings of the link between a server and its learner, and of how long traces are kept."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Self

from pydantic import BaseModel, Field, model_validator

from rlcore.transport import EndpointError, check_endpoint

RETENTION_HOURS = 30 * 24.0
"""A month of traffic: more than the replay holds at all but the lowest rates, and a term that people
know how to explain."""


class KeepsTraces(BaseModel):
    """Of whatever has traces on a disk."""

    retention_hours: float = Field(
        RETENTION_HOURS,
        gt=0,
        description="Hours after which a trace is deleted from memory, replay and recordings",
    )


class ServerEnd(BaseModel):
    """The end that connects."""

    curve_secret_file: Path | None = Field(
        None, description="Own CURVE keys for the link to the learner (paceline keys curve)"
    )
    curve_server_key_file: Path | None = Field(None, description="The learner's public CURVE key")

    @model_validator(mode="after")
    def _both_or_none(self) -> Self:
        if (self.curve_secret_file is None) != (self.curve_server_key_file is None):
            raise ValueError("--curve-secret-file and --curve-server-key-file belong together")
        return self


class LearnerEnd(BaseModel):
    """The end that is connected to."""

    curve_secret_file: Path | None = Field(
        None, description="Own CURVE keys for the link to servers (paceline keys curve)"
    )
    curve_clients_file: Path | None = Field(
        None, description="Public CURVE keys of the servers that may connect, one in a line"
    )

    @model_validator(mode="after")
    def _both_or_none(self) -> Self:
        if (self.curve_secret_file is None) != (self.curve_clients_file is None):
            raise ValueError("--curve-secret-file and --curve-clients-file belong together")
        return self


def link_endpoint(endpoint: str, known: dict[str, Any]) -> str:
    """The address itself, if it may be used with the settings ``known`` so far; raises ValueError."""
    try:
        return check_endpoint(endpoint, encrypted=known.get("curve_secret_file") is not None)
    except EndpointError as error:
        raise ValueError(str(error)) from None
