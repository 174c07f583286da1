"""Estimators of KL(p || q) from tokens that p sampled (Schulman 2020, "Approximating KL Divergence").

All take the log-probabilities of the sampled tokens under p and q, [T], and return one estimate per
token [T], differentiable in both.

As a term of a loss in p's parameters they differ from what they are as a measurement: the gradient of
k1 averages to zero, that of k2 to the gradient of KL(p || q), that of k3 to the gradient of
KL(q || p), which is close to it while p and q are.
"""

from __future__ import annotations

import torch
from torch import Tensor

LOG_RATIO_LIMIT = 20.0
"""Logarithms of ratios are held within this before they are exponentiated: e^20 is about 5e8, far
outside any clip range, and an infinite ratio times a zero advantage would be NaN."""


def k1(p: Tensor, q: Tensor) -> Tensor:
    """log p - log q: unbiased, of large variance, negative at times."""
    return p - q


def k2(p: Tensor, q: Tensor) -> Tensor:
    """(log p - log q)^2 / 2: of small bias while p and q are close."""
    return 0.5 * (p - q).square()


def k3(p: Tensor, q: Tensor) -> Tensor:
    """q/p - 1 - log(q/p): unbiased and never negative. Log-ratios beyond LOG_RATIO_LIMIT are cut."""
    log_ratio = (q - p).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    # expm1: near 0 the value is log_ratio^2 / 2, and exp(x) - 1 would lose it to rounding.
    return torch.expm1(log_ratio) - log_ratio
