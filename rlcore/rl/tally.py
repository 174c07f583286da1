"""What the rollouts between two updates were like."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from dataclasses import dataclass, field

from rlcore.rollout import Rollout, equal_rewards


@dataclass
class Tally:
    """Every finished group since the last update, those without an advantage included."""

    groups: int = 0
    all_right: int = 0
    """Groups with equal rewards, all of them right."""
    all_wrong: int = 0
    equal: int = 0
    """Groups whose rewards are all equal."""
    passed_over: int = 0
    """Turns of tasks that were left out, for they are known to teach little."""
    given_up: int = 0
    """Groups that came to nothing."""
    failed: Counter[str] = field(default_factory=Counter)
    """Episodes that came to nothing, by reason."""
    rewards: list[float] = field(default_factory=list)
    correct: int = 0
    lengths: list[int] = field(default_factory=list)
    cut_off: int = 0
    """Rollouts that ran into the limit."""
    logprobs: float = 0.0

    def add(self, group: list[Rollout]) -> None:
        self.groups += 1
        rewards = [r.reward for r in group]
        right = sum(r.correct for r in group)
        if equal_rewards(group):
            self.equal += 1
            self.all_right += right == len(group)
            self.all_wrong += right == 0
        self.rewards += rewards
        self.correct += right
        self.lengths += [r.sampled for r in group]
        self.cut_off += sum(r.finish_reason == "length" for r in group)
        self.logprobs += sum(math.fsum(r.logprobs) for r in group)

    @property
    def entropy(self) -> float:
        """Nats per token, estimated by the sampled tokens; NaN without any."""
        tokens = sum(self.lengths)
        return -self.logprobs / tokens if tokens else math.nan

    @property
    def accuracy(self) -> float:
        return self.correct / len(self.rewards) if self.rewards else math.nan

    @property
    def length(self) -> float:
        """Mean tokens per rollout."""
        return statistics.fmean(self.lengths) if self.lengths else math.nan

    def metrics(self) -> dict[str, float]:
        if not self.rewards:
            return {}
        return {
            "reward": statistics.fmean(self.rewards),
            "reward_std": statistics.pstdev(self.rewards),
            "accuracy": self.accuracy,
            "length": self.length,
            "cut_off": self.cut_off / len(self.rewards),
            "groups": self.groups,
            "passed_over": self.passed_over,
            "equal_groups": self.equal / self.groups,
            "all_right_groups": self.all_right / self.groups,
            "all_wrong_groups": self.all_wrong / self.groups,
            "sampled_entropy": self.entropy,
            "failed_episodes": sum(self.failed.values()),
        }
