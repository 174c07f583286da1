"""Advantages of rollouts from their rewards, without a critic.

Every estimator takes ``rewards`` [n] and ``group`` [n] int64 (which rollouts answer the same task)
and returns advantages [n] float32. A group may have any size. Where there is nothing to compare a
rollout with, its advantage is exactly 0: in a group of one, and in a group whose rewards are all the
same (with ``batch_norm``, which compares across groups: in a batch).

Standard deviations are those of a sample (n - 1), as the public implementations of GRPO compute
them; the papers do not say. They raise RewardError for a reward that is not finite.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

from rlcore.algorithms.segments import check_index, segment_constant, segment_size, segment_sum
from rlcore.errors import PacelineError

EPSILON = 1e-6
"""Added to a standard deviation before dividing by it. Rewards differ by far more than this, or not
at all, and then the advantage is 0 without its help."""

Advantage = Literal[
    "group_norm", "group_mean", "leave_one_out", "batch_norm", "group_mean_batch_norm"
]


class RewardError(PacelineError):
    """A reward that cannot be learned from."""


def group_norm(rewards: Tensor, group: Tensor) -> Tensor:
    """GRPO (Shao et al. 2024): (reward - group mean) / (group standard deviation + EPSILON)."""
    return _scaled(_centred(rewards, group), group).float()


def group_mean(rewards: Tensor, group: Tensor) -> Tensor:
    """Dr.GRPO (Liu et al. 2025): reward - group mean.

    Without the division, tasks that are nearly always or nearly never solved do not weigh more.
    """
    return _centred(rewards, group).float()


def leave_one_out(rewards: Tensor, group: Tensor) -> Tensor:
    """RLOO (Ahmadian et al. 2024): reward - mean of the others in the group."""
    centred, size = _centred(rewards, group), segment_size(group)
    return (centred * size / (size - 1).clamp(min=1)).float()


def batch_norm(rewards: Tensor, group: Tensor) -> Tensor:
    """REINFORCE++ (Hu 2025): (reward - batch mean) / (batch standard deviation + EPSILON).

    Each rollout counts once, whatever its length. Groups play no part.
    """
    check_index(group, rewards=rewards)
    batch = torch.zeros_like(group)
    return _scaled(_centred(rewards, batch), batch).float()


def group_mean_batch_norm(rewards: Tensor, group: Tensor) -> Tensor:
    """REINFORCE++ with baseline (Hu 2025): reward - group mean, over its deviation in the batch."""
    return _scaled(_centred(rewards, group), torch.zeros_like(group)).float()


ADVANTAGES: dict[Advantage, Callable[[Tensor, Tensor], Tensor]] = {
    "group_norm": group_norm,
    "group_mean": group_mean,
    "leave_one_out": leave_one_out,
    "batch_norm": batch_norm,
    "group_mean_batch_norm": group_mean_batch_norm,
}


def check_rewards(rewards: Tensor, group: Tensor) -> Tensor:
    """The rewards in float64; raises RewardError for one that is not finite."""
    check_index(group, rewards=rewards)
    bad = (~torch.isfinite(rewards)).nonzero().flatten().tolist()
    if bad:
        raise RewardError(
            f"the reward of rollout {bad[0]} of the batch is {float(rewards[bad[0]])} "
            f"({len(bad)} of {len(rewards)} are not finite); "
            "correct the environment's score, or leave such rollouts out"
        )
    return rewards.double()


def _centred(rewards: Tensor, group: Tensor) -> Tensor:
    """Reward minus its group's mean, float64; exactly 0 where that is so without rounding."""
    rewards = check_rewards(rewards, group)
    mean = segment_sum(rewards, group) / segment_size(group)
    return torch.where(segment_constant(rewards, group), 0.0, rewards - mean)


def _scaled(centred: Tensor, group: Tensor) -> Tensor:
    """Values of mean 0 over their group's standard deviation."""
    variance = segment_sum(centred.square(), group) / (segment_size(group) - 1).clamp(min=1)
    return centred / (variance.sqrt() + EPSILON)
