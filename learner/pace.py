"""How fast to learn, how often to publish, and when to stop until there is something to gain.

Publishing. A publication costs C tokens (what was not served during the stall, and what cold drafter
KV lost). Not publishing loses, too: with a gain in acceptance length that grows by g per served
token, an interval of T tokens serves on average g T / 2 below what could be. The sum of both per
token, C / T + g T / (2 L) with L the acceptance length, is least at T = sqrt(2 C L / g) (Harris's
lot size), so the interval follows the measured gain and cost. Tokens served are the clock: a pause
in the traffic is neither progress nor delay, and in one a swap is in nobody's way. A swap that gains
less than L C / T is not worth it.

Learning. The learning rate is halved after judgements that show no gain (reduce on plateau), kept by a
promotion, raised by drift. At its floor and still without a gain, the learner idles until there is
drift or much more traffic.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass

LR_FLOOR = 1 / 16
"""Smallest share of the configured learning rates."""

TRAINED_LR = 0.3
"""Share to start with from a trained drafter: at the full rate it would first be unlearned."""

DRIFT_LR = 0.5
"""Share that drift raises the learning rate to, at least."""

PATIENCE = 2
"""Judgements without a gain, in a row, that halve the learning rate."""

PLATEAU_TOKENS = 25_000
"""Positions trained since the last judgement for this one to say anything about the learning rate. On
half a million positions of general text a drafter still gains 0.02 with so many; with fewer, the gate's
noise (5,000 held-out positions) hides that, and the rate would fall much too early."""

IDLE_JUDGEMENTS = 3
"""Judgements without a gain at LR_FLOOR, in a row, that end learning for the time being."""

WAKE_FACTOR = 2.0
"""Learning starts again when this many times the tokens received until it stopped have come."""

SHORTEST_INTERVAL = 15.0
LONGEST_INTERVAL = 900.0
"""Seconds between two judgements."""

LARGEST_CHANGE = 2.0
"""Factor by which one judgement lengthens the interval, at most: its gain is an estimate."""

NOTICED_GAIN = 0.005
"""Acceptance length; a smaller measured gain counts as this, for no judgement could tell."""

JUDGING_SHARE = 0.2
"""Share of the learner's time that judging may take."""

EARLY_HELDOUT = 1500
"""Held-out positions since drift that make a judgement ahead of time worth it."""

COST_MEMORY = 5
"""Swaps that the measured cost is averaged over, about."""

LARGEST_COST = 1e6
"""Tokens; a cost beyond it, or NaN, was measured wrongly and is left out."""

LARGEST_GAIN = 16.0
"""Acceptance length; the same for a gain, which then counts as none."""

FIRST_COST = 50.0
"""Tokens that a swap is taken to cost until one was measured."""


@dataclass(frozen=True)
class Traffic:
    """Totals at present, and the speed."""

    received: int
    """Output positions that may be trained on."""
    heldout: int
    """Output positions received that are held out (a total, not what is kept)."""
    trained: int
    """Positions trained, repeats counted."""
    tokens_per_second: float
    """Served at present."""

    @property
    def served(self) -> int:
        return self.received + self.heldout


@dataclass(frozen=True)
class Outcome:
    """What a judgement on enough traffic found."""

    gain: float
    gain_lower: float
    length: float
    """The live version's acceptance length."""
    won: bool
    """The gate let it through; ``Pace.published`` says that it went live."""
    seconds: float
    """That it took."""


@dataclass(frozen=True)
class Pacing:
    lr_scale: float
    """Of the configured learning rates, in [LR_FLOOR, 1]."""
    publish_interval_s: float
    train: bool
    judge_now: bool
    """Drift was seen, and there is enough of the new traffic to judge by."""
    least_gain: float
    """Acceptance length that a swap has to gain."""
    reason: str


@dataclass
class _Memory:
    """Everything that a restart has to bring back."""

    lr_scale: float
    reason: str
    growth: float | None = None
    """g: gain in acceptance length per token served; None until a judgement has measured it."""
    cost: float = FIRST_COST
    """C, tokens."""
    swaps: int = 0
    length: float = 1.0
    """L"""
    judging_s: float = 0.0
    without_gain: int = 0
    """Judgements in a row."""
    judged_at: int = 0
    """Positions trained at the last judgement that counted."""
    published_at: int = 0
    """Tokens served at the last publication."""
    drift_at: int | None = None
    """Held-out positions when drift was seen; None when it has been answered."""
    idle_at: int | None = None
    """Positions received when learning ended; None while it goes on."""


class Pace:
    def __init__(self, trained: bool) -> None:
        """``trained``: learning starts from a drafter that was trained before."""
        if trained:
            self._memory = _Memory(TRAINED_LR, "from a trained drafter")
        else:
            self._memory = _Memory(1.0, "from an untrained drafter")

    def pacing(self, traffic: Traffic) -> Pacing:
        memory = self._memory
        if memory.idle_at is not None and traffic.received >= WAKE_FACTOR * memory.idle_at:
            memory.idle_at = None
            memory.without_gain = 0
            memory.lr_scale = max(memory.lr_scale, TRAINED_LR)
            memory.reason = "much new traffic"
        new = 0 if memory.drift_at is None else traffic.heldout - memory.drift_at
        return Pacing(
            lr_scale=memory.lr_scale,
            publish_interval_s=self._interval(traffic.tokens_per_second),
            train=memory.idle_at is None,
            judge_now=new >= EARLY_HELDOUT,
            least_gain=self._least_gain(),
            reason=memory.reason,
        )

    def drifted(self, traffic: Traffic) -> None:
        """Acceptance has dropped: learn fast, and publish as soon as can be."""
        memory = self._memory
        memory.lr_scale = max(memory.lr_scale, DRIFT_LR)
        memory.growth = None
        memory.without_gain = 0
        memory.published_at = traffic.served  # what was gained before is no measure any more
        memory.drift_at = traffic.heldout
        memory.idle_at = None
        memory.reason = "drift"

    def swapped(self, stall_s: float, cold_tokens: float, traffic: Traffic) -> None:
        """A publication's measured cost: the stall, and tokens lost to cold drafter KV."""
        cost = stall_s * traffic.tokens_per_second + cold_tokens
        if 0 <= cost <= LARGEST_COST:
            self._memory.swaps = min(self._memory.swaps + 1, COST_MEMORY)
            self._memory.cost += (cost - self._memory.cost) / self._memory.swaps

    def judged(self, outcome: Outcome, traffic: Traffic) -> None:
        memory = self._memory
        gain = outcome.gain if abs(outcome.gain) <= LARGEST_GAIN else 0.0
        too_small = outcome.gain_lower > 0 and gain < self._least_gain()
        memory.drift_at = None
        memory.judging_s = outcome.seconds
        memory.length = max(1.0, outcome.length)
        self._measure(gain, traffic)
        if outcome.won or too_small:
            memory.without_gain = 0
            memory.reason = "a version won" if outcome.won else "the gain does not pay for a swap"
        elif traffic.trained - memory.judged_at >= PLATEAU_TOKENS:
            self._no_gain(traffic)
        else:
            return
        memory.judged_at = traffic.trained

    def published(self, served: int) -> None:
        """A version that won is live, from so many served tokens on."""
        self._memory.published_at = served
        self._memory.reason = "promoted"

    def rolled_back(self) -> None:
        """A promoted version was worse live: what is held out misleads, so go slowly."""
        self._memory.lr_scale = max(LR_FLOOR, self._memory.lr_scale / 2)
        self._memory.idle_at = None
        self._memory.without_gain = 0
        if self._memory.growth is not None:
            self._memory.growth /= LARGEST_CHANGE**2
        self._memory.reason = "rolled back"

    def _no_gain(self, traffic: Traffic) -> None:
        memory = self._memory
        memory.without_gain += 1
        memory.reason = f"{memory.without_gain} judgements without a gain"
        if memory.lr_scale > LR_FLOOR and memory.without_gain >= PATIENCE:
            memory.lr_scale = max(LR_FLOOR, memory.lr_scale / 2)
            memory.without_gain = 0
            memory.reason = f"learning rate halved: {PATIENCE} judgements without a gain"
        elif memory.lr_scale <= LR_FLOOR and memory.without_gain >= IDLE_JUDGEMENTS:
            memory.idle_at = traffic.received
            memory.reason = "idle: nothing is to be gained"

    def _measure(self, gain: float, traffic: Traffic) -> None:
        memory = self._memory
        served = traffic.served - memory.published_at
        if served > 0:
            growth = max(gain, NOTICED_GAIN) / served
            memory.growth = max(growth, (memory.growth or 0.0) / LARGEST_CHANGE**2)

    def _interval(self, tokens_per_second: float) -> float:
        memory = self._memory
        shortest = max(SHORTEST_INTERVAL, memory.judging_s / JUDGING_SHARE)
        if memory.growth is None or tokens_per_second == 0.0:
            return min(shortest, LONGEST_INTERVAL)
        lot = math.sqrt(2 * memory.cost * memory.length / memory.growth)
        interval = LONGEST_INTERVAL
        if LONGEST_INTERVAL * tokens_per_second > lot:
            interval = lot / tokens_per_second
        return min(LONGEST_INTERVAL, max(shortest, interval))

    def _least_gain(self) -> float:
        """L C / T"""
        memory = self._memory
        return math.sqrt(memory.length * memory.cost * (memory.growth or 0.0) / 2)

    def state(self) -> dict[str, object]:
        return asdict(self._memory)

    def load_state(self, state: dict) -> None:
        self._memory = _Memory(**state)
