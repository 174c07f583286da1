"""The error of a state machine that was told what cannot have happened."""

from __future__ import annotations

from rlcore.errors import PacelineError


class EventError(PacelineError):
    """An event that cannot follow those before it: a fault of the caller's, never of the data's."""
