"""The sampling temperature, from the policy's entropy and the groups that teach nothing.

A group whose rewards are all equal has no advantage. When most groups are all right, or the policy has
lost its entropy, rollouts differ too little: the temperature rises. When most are all wrong although
there is entropy enough, noise spoils them: it falls. When all is well again, it goes back to where it
began, for at that temperature the policy is trained as it will be used.

Entropy is that of the distribution sampled from, in nats per token; minus the mean inference
log-probability of the sampled tokens is an unbiased estimate. It is compared with what it was when the
run began, since its size depends on the task.

A change concerns rollouts started after it, none in flight: the decision is stamped on each rollout
(``Sampling.temperature``). The inference log-probabilities are then of the tempered distribution, so the
trainer has to divide the logits by the same temperature for the tokens of that rollout; else every
importance ratio is wrong. Changes are slow for the same reason that staleness is: what is observed was
sampled some updates ago.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass

from rlcore.errors import UsageError

STEP = 0.05
"""Size of a change. Below it, entropy hardly moves; a larger one would be felt as a jump in the ratio of
sampled to greedy accuracy."""

LEAST, MOST = 0.7, 1.3
"""Clamp. Above 1.3 a small model's long tail of bad tokens is sampled; below 0.7 it hardly explores."""

MEMORY = 4
"""Updates that the averages look back on, about."""

REFERENCE_UPDATES = 4
"""Updates at the start whose mean entropy is the reference."""

PERSISTENCE = 3
"""Updates in a row with the same cause before a change."""

COOLDOWN = 6
"""Updates between two changes: rollouts of the new temperature have to arrive first, and be averaged."""

COLLAPSED = 0.25
"""Share of the reference entropy below which rollouts are too alike."""

HEALTHY = 0.5
"""Share of it from which there is entropy enough. Between the two nothing is done (hysteresis)."""

NOISY = 1.5
"""Share of it above which the temperature is not raised, whatever the groups say."""

MANY_ALL_RIGHT = 0.5
FEW_ALL_RIGHT = 0.25
"""Share of groups that are all right: above the one the temperature rises, and below the other it may
go back. Half is where half of the generated tokens teach nothing."""

MANY_ALL_WRONG = 0.7
FEW_ALL_WRONG = 0.4
"""The same for all wrong. Higher, since hard tasks begin with many of them, and they need exploration."""


@dataclass(frozen=True)
class UpdateSample:
    """The rollouts of one update, those of groups without an advantage included."""

    entropy: float
    """Nats per token of the distribution sampled from."""
    groups: int
    all_right: int
    """Groups with equal rewards, all of them right."""
    all_wrong: int


@dataclass(frozen=True)
class TemperatureDecision:
    temperature: float
    """For rollouts started from now on."""
    changed: bool
    reason: str


@dataclass
class _Memory:
    temperature: float
    seen: int = 0
    reference: float = 0.0
    """Mean entropy of the first updates."""
    entropy: float = 0.0
    all_right: float = 0.0
    all_wrong: float = 0.0
    cause: str = ""
    """What the last updates call for, and for how many of them in a row."""
    persisted: int = 0
    since_change: int = COOLDOWN


class TemperatureControl:
    """``observe`` once an update: its sample in, the temperature out."""

    def __init__(self, start: float = 1.0) -> None:
        if not LEAST <= start <= MOST:
            raise UsageError(f"temperature {start} is not in [{LEAST}, {MOST}]; give one that is")
        self.start = start
        self._memory = _Memory(start)

    @property
    def temperature(self) -> float:
        return self._memory.temperature

    def observe(self, sample: UpdateSample) -> TemperatureDecision:
        """A sample without groups, or whose entropy is not finite, says nothing and is left out."""
        memory = self._memory
        if sample.groups < 1 or not math.isfinite(sample.entropy):
            return TemperatureDecision(memory.temperature, False, "nothing to judge by")
        self._average(sample)
        memory.since_change += 1
        cause, direction = self._cause()
        memory.persisted = memory.persisted + 1 if cause == memory.cause else 1
        memory.cause = cause
        wanted = self._moved(direction)
        ready = memory.persisted >= PERSISTENCE and memory.since_change > COOLDOWN
        if memory.seen <= REFERENCE_UPDATES or not ready or wanted == memory.temperature:
            return TemperatureDecision(memory.temperature, False, cause)
        before, memory.temperature = memory.temperature, wanted
        memory.since_change = 0
        return TemperatureDecision(wanted, True, f"{before:.2f} to {wanted:.2f}: {cause}")

    def _average(self, sample: UpdateSample) -> None:
        memory = self._memory
        memory.seen += 1
        share = max(1 / memory.seen, 1 / MEMORY)
        memory.entropy += share * (sample.entropy - memory.entropy)
        memory.all_right += share * (sample.all_right / sample.groups - memory.all_right)
        memory.all_wrong += share * (sample.all_wrong / sample.groups - memory.all_wrong)
        if memory.seen <= REFERENCE_UPDATES:
            memory.reference += (sample.entropy - memory.reference) / memory.seen

    def _cause(self) -> tuple[str, str]:
        """Why, and where to: up, down, back or stay."""
        memory = self._memory
        entropy = memory.entropy / memory.reference if memory.reference > 0 else 1.0
        if entropy < COLLAPSED:
            return f"entropy fell to less than {COLLAPSED:.0%} of the start's", "up"
        if memory.all_right > MANY_ALL_RIGHT and entropy < NOISY:
            return f"more than {MANY_ALL_RIGHT:.0%} of the groups are all right", "up"
        if memory.all_wrong > MANY_ALL_WRONG and entropy >= HEALTHY:
            return f"more than {MANY_ALL_WRONG:.0%} of the groups are all wrong", "down"
        few = memory.all_right < FEW_ALL_RIGHT and memory.all_wrong < FEW_ALL_WRONG
        if few and entropy >= HEALTHY:
            return "entropy and groups are as they should be", "back"
        return "between the thresholds", "stay"

    def _moved(self, direction: str) -> float:
        now = self._memory.temperature
        if direction == "back":
            change = max(-STEP, min(STEP, self.start - now))
        else:
            change = {"up": STEP, "down": -STEP, "stay": 0.0}[direction]
        return round(max(LEAST, min(MOST, now + change)), 6)

    def state(self) -> dict[str, object]:
        return asdict(self._memory)

    def load_state(self, state: dict) -> None:
        self._memory = _Memory(**state)
