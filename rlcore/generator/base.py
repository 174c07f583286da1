"""The protocol of a generator: tokens in, tokens out, each with the policy version that sampled it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from rlcore.errors import PacelineError
from rlcore.records.trace import Sampling


class GeneratorError(PacelineError):
    """The generator cannot do what it was asked. ``gone``: it does not answer at all."""

    def __init__(self, message: str, *, gone: bool = False) -> None:
        super().__init__(message)
        self.gone = gone


@dataclass(frozen=True)
class Completion:
    """What was sampled; the three lists are equally long."""

    token_ids: list[int]
    logprobs: list[float]
    """Of each token, under the distribution that it was sampled from."""
    policy_versions: list[int]
    finish_reason: str
    """``stop`` or ``length``."""
    draft_version: int


@dataclass(frozen=True)
class Published:
    """A policy version went live."""

    version: int
    stall_s: float
    """The engine stood still for it."""
    reprefilled: int
    """Tokens of running requests that were computed again under the new weights."""


@dataclass(frozen=True)
class GeneratorStatus:
    policy_version: int
    draft_version: int
    target_id: str = ""
    """Of the model that the generator started with."""
    emitted: int = 0
    """Tokens of steps in which something was drafted, since the generator started."""
    draft_steps: int = 0
    """Decoding steps with drafts."""
    plain_steps: int = 0
    """Decoding steps without."""


class Generator(Protocol):
    """All waits end by a deadline; raises GeneratorError."""

    async def complete(
        self,
        prompt_ids: Sequence[int],
        sampling: Sampling,
        max_tokens: int,
        *,
        priority: int = 0,
        tenant: str = "default",
        learn: bool = True,
    ) -> Completion:
        """Sample until an end-of-sequence token or ``max_tokens``.

        ``priority``: lower is sooner. ``learn``: whether the draft learner may learn from it.
        """
        ...

    async def publish(self, version: int, folder: Path, sha256: str) -> Published:
        """Make the weights in ``folder`` the ones that sample, requests going on meanwhile."""
        ...

    async def status(self) -> GeneratorStatus: ...

    async def compute_on(self, cores: int) -> None:
        """Have the model compute on so many of a CPU's cores."""
        ...

    async def longest(self) -> int:
        """Tokens of the longest sequence that it takes."""
        ...

    async def healthy(self) -> bool:
        """Whether it answers and its engine is alive."""
        ...

    async def close(self) -> None: ...
