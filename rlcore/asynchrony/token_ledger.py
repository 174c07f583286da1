"""What became of every token that the engine worked on for rollouts.

A token is processed when it is sampled, and again when it is computed anew because its KV was lost
(preemption, a rollout resumed after a weight update). Tokens computed anew have their fate at once;
sampled ones when their rollout is settled. At any time

    processed = sum over fates + in flight + waiting

so no token can go missing between the engine and the trainer. Effective tokens are those trained on.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from enum import StrEnum

from rlcore.asynchrony.errors import EventError


class Fate(StrEnum):
    TRAINED = "trained"
    """In the loss of an optimizer update, with an advantage that is not 0."""
    STALE = "stale"
    """Dropped because the policy that sampled them is too old."""
    MASKED = "masked"
    """Given the weight 0 by a correction, although it has an advantage."""
    ZERO_ADVANTAGE = "zero_advantage"
    """Of a group with equal rewards, or otherwise with no advantage."""
    SKIPPED = "skipped"
    """Of an update that was not taken: its loss or gradient was not finite."""
    FAILED = "failed"
    """The environment failed, or the process that held them died."""
    REPREFILLED = "reprefilled"
    """Computed anew; not sampled, so no rollout is settled with it."""


@dataclass(frozen=True)
class Totals:
    """Tokens since the start of the run, or in a span of it (``since``)."""

    fates: Mapping[Fate, int]
    """All fates, 0 where there are none."""
    in_flight: int
    """Sampled, of rollouts that go on."""
    waiting: int
    """Sampled, of finished rollouts that are not settled."""

    @property
    def processed(self) -> int:
        return sum(self.fates.values()) + self.in_flight + self.waiting

    @property
    def effective_share(self) -> float:
        """Trained tokens over those with a fate; 0 when none has one."""
        settled = sum(self.fates.values())
        return self.fates[Fate.TRAINED] / settled if settled else 0.0

    def since(self, earlier: Totals) -> Totals:
        """The difference; those in flight and waiting may then be negative."""
        return Totals(
            {fate: count - earlier.fates[fate] for fate, count in self.fates.items()},
            self.in_flight - earlier.in_flight,
            self.waiting - earlier.waiting,
        )


@dataclass(frozen=True)
class EffectiveRate:
    tokens_per_second: float
    """Trained tokens per second of wall time."""
    tokens_per_core_second: float


def effective_rate(span: Totals, seconds: float, cores: float) -> EffectiveRate:
    """``span``: totals of these ``seconds``. ``cores``: CPU cores (or GPUs) that the run was given."""
    if seconds <= 0 or cores <= 0:
        raise EventError(f"no rate over {seconds} seconds on {cores} cores; both must be above 0")
    per_second = span.fates[Fate.TRAINED] / seconds
    return EffectiveRate(per_second, per_second / cores)


class TokenLedger:
    """Events in, ``totals`` out. Raises EventError for tokens that cannot be accounted for."""

    def __init__(self) -> None:
        self._processed = 0
        self._fates = dict.fromkeys(Fate, 0)
        self._in_flight: dict[str, int] = {}
        """Rollout -> tokens sampled."""
        self._waiting: dict[str, int] = {}

    def sampled(self, rollout: str, tokens: int) -> None:
        """``tokens`` more of a rollout, which may be new."""
        if tokens < 0 or rollout in self._waiting:
            raise EventError(f"{tokens} tokens sampled for rollout {rollout}, finished or negative")
        self._in_flight[rollout] = self._in_flight.get(rollout, 0) + tokens
        self._processed += tokens

    def reprefilled(self, tokens: int) -> None:
        if tokens < 0:
            raise EventError(f"{tokens} tokens computed anew; the count must not be negative")
        self._fates[Fate.REPREFILLED] += tokens
        self._processed += tokens

    def finished(self, rollout: str) -> None:
        """It goes on no more and waits for the trainer."""
        if rollout not in self._in_flight:
            raise EventError(f"rollout {rollout} finished without being in flight")
        self._waiting[rollout] = self._in_flight.pop(rollout)

    def settled(self, rollout: str, fates: Mapping[Fate, int]) -> None:
        """The fates of all tokens of a rollout, in flight or waiting. It is then forgotten."""
        self.settled_together([rollout], fates)

    def settled_together(self, rollouts: Collection[str], fates: Mapping[Fate, int]) -> None:
        """The same for all the tokens of several."""
        if Fate.REPREFILLED in fates or any(count < 0 for count in fates.values()):
            raise EventError(f"rollouts {rollouts} settled with negative counts or as reprefilled")
        tokens = 0
        for rollout in rollouts:
            if rollout not in self._waiting and rollout not in self._in_flight:
                raise EventError(f"rollout {rollout} is unknown, or was settled before")
            tokens += self._waiting.get(rollout, self._in_flight.get(rollout, 0))
        if sum(fates.values()) != tokens or len(set(rollouts)) != len(rollouts):
            raise EventError(
                f"rollouts {rollouts} have {tokens} tokens, not the {sum(fates.values())} they are "
                "settled with, or are named twice"
            )
        for rollout in rollouts:
            self._waiting.pop(rollout, None)
            self._in_flight.pop(rollout, None)
        for fate, count in fates.items():
            self._fates[fate] += count

    def lost(self, rollout: str) -> None:
        """An open rollout is gone as a whole: its tokens failed."""
        book = self._waiting if rollout in self._waiting else self._in_flight
        self.settled(rollout, {Fate.FAILED: book.get(rollout, 0)})

    @property
    def open(self) -> tuple[str, ...]:
        """Rollouts in flight and waiting."""
        return (*self._in_flight, *self._waiting)

    def totals(self) -> Totals:
        totals = Totals(
            dict(self._fates), sum(self._in_flight.values()), sum(self._waiting.values())
        )
        if totals.processed != self._processed:
            raise EventError(
                f"{self._processed} tokens processed, {totals.processed} accounted for"
            )
        return totals

    def state(self) -> dict[str, object]:
        return {
            "processed": self._processed,
            "fates": {str(fate): count for fate, count in self._fates.items()},
            "in_flight": dict(self._in_flight),
            "waiting": dict(self._waiting),
        }

    def load_state(self, state: dict) -> None:
        """Open rollouts come back as they were; ``lost`` is for those that nobody has any more."""
        self._processed = state["processed"]
        self._fates = {fate: state["fates"][fate] for fate in Fate}
        self._in_flight = dict(state["in_flight"])
        self._waiting = dict(state["waiting"])
