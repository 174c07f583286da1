"""What speculation gains: the time steps took beside the time their tokens would have taken without it.

Of a step that took s seconds, verified drafts of b requests and emitted n tokens for them, with
c(b, k) the measured cost of a step (``StepCost``):

    without speculation = s - c(b, k) + (n / b) c(b, 0)

A plain step emits one token for each request, so the n tokens need n / b of them. What the step took over
its kind's usual cost (a prefill in it, a swap, a stall) would have been taken without speculation too.
For a step with nothing drafted that is s itself. It is not known, and the step counts on neither side,
while c(b, 0) has not been measured: with a fixed number of drafts it never is. c(b, 0) counts for no more
than c(b, 1), c(b, 2) ..., so a speed-up is never told to be above the tokens of a step.

A plain step of ours still keeps the drafter's cache up to date, so the estimate is that of a server that has
a drafter and does not use it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from rlcore.speculation.cost import StepCost


@dataclass(frozen=True)
class StepFacts:
    """One step of the engine."""

    decoding: int
    """Requests that it decoded."""
    others: int
    """Requests whose prompt it read."""
    proposed: int
    """Drafts asked for at its end, for each request."""
    verified: int
    """Drafts verified, of all requests."""
    usual: bool
    """Nothing but decoding, with nearly as many drafts verified as proposed: what ``StepCost`` takes."""
    tokens: int
    """Emitted for the requests that it decoded."""


@dataclass
class Gain:
    """Totals since the start. Speed-up = ``plain_seconds`` / ``seconds``."""

    decode_steps: int = 0
    drafts: int = 0
    """Summed over the decode steps, as asked for in each: their mean is the mean K."""
    tokens: int = 0
    """Emitted by the decode steps."""
    seconds: float = 0.0
    """Measured, of the steps that can be compared."""
    plain_seconds: float = 0.0
    """Estimated for the same work without speculation."""
    unknown_seconds: float = 0.0
    """Measured, of the steps that cannot be compared."""

    def observe(self, step: StepFacts, seconds: float, cost: StepCost) -> None:
        """Take a step's duration; one that is not positive and finite is ignored."""
        if not 0 < seconds < math.inf:
            return
        if step.decoding:
            self.decode_steps += 1
            self.drafts += step.proposed
            self.tokens += step.tokens
        plain = plain_seconds(step, seconds, cost)
        if plain is None:
            self.unknown_seconds += seconds
        else:
            self.seconds += seconds
            self.plain_seconds += plain


def plain_seconds(step: StepFacts, seconds: float, cost: StepCost) -> float | None:
    """The formula above; None while it is not known."""
    if not step.decoding or not (step.proposed or step.verified):
        return seconds
    plain = _plain_cost(step, cost)
    if plain is None:
        return None
    same_tokens = step.tokens / step.decoding * plain
    if not step.usual and not step.others:
        return same_tokens  # between two numbers of drafts: of no kind whose usual cost is measured
    usual = cost.seconds(step.decoding, step.proposed)
    if usual is None:
        return None if step.others else same_tokens
    return max(0.0, seconds - usual + same_tokens)


def _plain_cost(step: StepFacts, cost: StepCost) -> float | None:
    """c(b, 0), but no more than any step of so many requests: drafts never make a step shorter. A plain
    step may have been measured last when the machine was slower than it is now."""
    costs = [cost.seconds(step.decoding, drafts) for drafts in range(step.proposed + 1)]
    return None if costs[0] is None else min(c for c in costs if c is not None)
