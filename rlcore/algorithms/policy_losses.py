"""Policy losses by token, to be minimised.

All take, for each sampled token of a packed batch [T]: ``logprobs`` of the policy in training (with
gradient), ``old_logprobs`` of the policy that the update starts from, and ``advantages``. Clip ranges
are distances from 1: the ratio's bounds are 1 - clip_low and 1 + clip_high.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from rlcore.algorithms.kl import LOG_RATIO_LIMIT
from rlcore.algorithms.segments import segment_mean


@dataclass(frozen=True)
class PolicyLoss:
    """``loss`` [T] with gradient; the rest [T] without, for diagnostics.

    ``ratio`` is the importance ratio that was used. ``clipped_low`` and ``clipped_high`` mark the
    tokens where a bound took effect.
    """

    loss: Tensor
    ratio: Tensor
    clipped_low: Tensor
    clipped_high: Tensor


def ppo(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None = None,
) -> PolicyLoss:
    """PPO's clipped surrogate (Schulman et al. 2017), with two bounds (DAPO, Yu et al. 2025).

    ``dual_clip`` > 1 + clip_high also bounds the loss of a token of negative advantage, whose ratio
    may grow without end, at ``dual_clip`` times the advantage (Ye et al. 2020).
    """
    ratio = _bounded_exp(logprobs - old_logprobs)
    return _clipped(ratio, advantages, clip_low, clip_high, dual_clip)


def gspo(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    sequence: Tensor,
    clip_low: float,
    clip_high: float,
) -> PolicyLoss:
    """GSPO (Zheng et al. 2025): the ratio of a token is the geometric mean over its sequence.

    In the paper's token form: the ratio's value is the sequence's, its gradient the token's own. With
    one advantage for all tokens of a sequence and equal weights that is the gradient of the sequence
    form, and it stays right where advantages or weights differ within a sequence.
    """
    log_ratio = logprobs - old_logprobs
    mean = segment_mean(log_ratio.detach(), sequence).to(log_ratio.dtype)
    ratio = _bounded_exp(mean + (logprobs - logprobs.detach()))
    return _clipped(ratio, advantages, clip_low, clip_high, None)


def cispo(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, clip_low: float, clip_high: float
) -> PolicyLoss:
    """CISPO (MiniMax 2025, "MiniMax-M1"): REINFORCE weighted by the clipped, detached ratio.

    A token beyond the bounds keeps a gradient, unlike with PPO. clip_low = 1 is no lower bound.
    """
    ratio = _bounded_exp(logprobs.detach() - old_logprobs)
    low, high = 1 - clip_low, 1 + clip_high
    loss = -ratio.clamp(low, high) * advantages * logprobs
    return PolicyLoss(loss, ratio, ratio < low, ratio > high)


def reinforce(logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor) -> PolicyLoss:
    """REINFORCE (Williams 1992): -advantage * log-probability, with no ratio and no bounds.

    Right only where the policy in training is the old one: one update for each batch.
    """
    ratio = _bounded_exp(logprobs.detach() - old_logprobs)
    never = torch.zeros_like(ratio, dtype=torch.bool)
    return PolicyLoss(-advantages * logprobs, ratio, never, never)


def _bounded_exp(log_ratio: Tensor) -> Tensor:
    return log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()


def _clipped(
    ratio: Tensor, advantages: Tensor, clip_low: float, clip_high: float, dual_clip: float | None
) -> PolicyLoss:
    low, high = 1 - clip_low, 1 + clip_high
    gain = torch.minimum(ratio * advantages, ratio.clamp(low, high) * advantages)
    value = ratio.detach()
    clipped_low = (value < low) & (advantages < 0)
    clipped_high = (value > high) & (advantages > 0)
    if dual_clip is not None:
        floored = (value > dual_clip) & (advantages < 0)
        gain = torch.where(floored, dual_clip * advantages, gain)
        clipped_high = clipped_high | floored
    return PolicyLoss(-gain, value, clipped_low, clipped_high)
