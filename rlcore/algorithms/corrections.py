"""Weights for the difference between the trainer's policy and the generator's.

The generator samples with its own kernels, its own precision and, in an asynchronous run, older
weights. So the ratio that a token has to be weighted with is rho = pi_old / pi_inference: the
trainer's log-probability at the policy the update starts from over the one recorded in sampling.

All functions take ``old_logprobs``, ``inference_logprobs`` and ``sequence``, each [T], and the bounds
of the ratio, and return weights [T] without gradient, to multiply the policy loss with. They go with
any loss. A token that is masked has weight 0 and still counts in the normaliser: fewer tokens make a
smaller step, not the others a larger one. A log-probability that is NaN makes the weight NaN (but for
``none``), and the trainer skips such an update.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

from rlcore.algorithms.kl import LOG_RATIO_LIMIT, k1, k3
from rlcore.algorithms.segments import segment_mean, segment_sum

Bounds = tuple[float, float]
Correction = Literal[
    "none", "token_tis", "sequence_tis", "sequence_mask", "icepop", "geometric_mask"
]

BOUNDS: dict[Correction, Bounds] = {
    "none": (0.0, float("inf")),
    "token_tis": (0.0, 2.0),
    "sequence_tis": (0.0, 2.0),
    "sequence_mask": (0.0, 2.0),
    "icepop": (0.5, 5.0),
    "geometric_mask": (1 / 1.001, 1.001),
}
"""Published bounds. Caps of 2: Yao et al. 2025 and Liu et al. 2025, cited below. IcePop: the
authors'. The geometric mean is of a token, so its bounds lie close: 1.001 is e over 1,000 tokens."""


def none(old_logprobs: Tensor, inference_logprobs: Tensor, sequence: Tensor, b: Bounds) -> Tensor:
    """Weight 1: the generator's policy is taken to be the trainer's."""
    return torch.ones_like(old_logprobs)


def token_tis(
    old_logprobs: Tensor, inference_logprobs: Tensor, sequence: Tensor, bounds: Bounds
) -> Tensor:
    """Truncated importance sampling by token: rho within the bounds.

    Yao et al. 2025, "Your Efficient RL Framework Secretly Brings You Off-Policy RL Training".
    """
    return _ratio(k1(old_logprobs, inference_logprobs)).clamp(*bounds)


def sequence_tis(
    old_logprobs: Tensor, inference_logprobs: Tensor, sequence: Tensor, bounds: Bounds
) -> Tensor:
    """Truncated importance sampling by sequence: the product of its rhos, within the bounds.

    Liu et al. 2025, "When Speed Kills Stability". Unbiased but for the cap, of larger variance.
    """
    return _ratio(segment_sum(k1(old_logprobs, inference_logprobs), sequence)).clamp(*bounds)


def sequence_mask(
    old_logprobs: Tensor, inference_logprobs: Tensor, sequence: Tensor, bounds: Bounds
) -> Tensor:
    """Masked importance sampling by sequence: the product of its rhos; 0 outside the bounds.

    Liu et al. 2025: a sequence far beyond the cap is more often broken than valuable.
    """
    ratio = _ratio(segment_sum(k1(old_logprobs, inference_logprobs), sequence))
    return ratio * _within(ratio, bounds)


def icepop(
    old_logprobs: Tensor, inference_logprobs: Tensor, sequence: Tensor, bounds: Bounds
) -> Tensor:
    """IcePop (Ling Team 2025, "Every Step Evolves"): rho by token; 0 outside the bounds."""
    ratio = _ratio(k1(old_logprobs, inference_logprobs))
    return ratio * _within(ratio, bounds)


def geometric_mask(
    old_logprobs: Tensor, inference_logprobs: Tensor, sequence: Tensor, bounds: Bounds
) -> Tensor:
    """1 for a sequence whose geometric mean of rho lies within the bounds, otherwise 0.

    Liu et al. 2025. Does not depend on length as the product does; rejects, and does not reweight.
    """
    mean = _ratio(segment_mean(k1(old_logprobs, inference_logprobs), sequence))
    # NaN is within no bounds, and would pass for a sequence that was merely rejected.
    return torch.where(torch.isnan(mean), mean, _within(mean, bounds))


CORRECTIONS: dict[Correction, Callable[[Tensor, Tensor, Tensor, Bounds], Tensor]] = {
    "none": none,
    "token_tis": token_tis,
    "sequence_tis": sequence_tis,
    "sequence_mask": sequence_mask,
    "icepop": icepop,
    "geometric_mask": geometric_mask,
}


def mismatch_kl(old_logprobs: Tensor, inference_logprobs: Tensor) -> tuple[Tensor, Tensor]:
    """KL(inference || trainer) by token, as k1 [T] and as k3 [T].

    Near 0 where both compute the same policy; the first sign that they do not.
    """
    return k1(inference_logprobs, old_logprobs), k3(inference_logprobs, old_logprobs)


def _ratio(log_ratio: Tensor) -> Tensor:
    return log_ratio.detach().clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp().float()


def _within(ratio: Tensor, bounds: Bounds) -> Tensor:
    return ((ratio >= bounds[0]) & (ratio <= bounds[1])).float()
