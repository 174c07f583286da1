"""Log-probabilities of chosen tokens out of hidden states, without keeping the logits.

Logits are always computed in float32: a rounding of them to bfloat16 is an error of up to 0.1 in the
log-probability. Their gradient is the probabilities less the one chosen, which bears rounding well, so
for a bfloat16 trainer the backward products are in bfloat16, and the probabilities are kept in it where
they are not too many.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

CHUNK = 512
"""Tokens whose whole logits are in memory at a time: 100 MB for a vocabulary of 50,000."""

MOST_KEPT = 2**28
"""Probabilities kept for the backward pass, half a gigabyte in bfloat16; with more they are computed
again."""


TINY = 1e-30
"""A probability below it has no part in an entropy."""


class _Chosen(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, weight: Tensor, labels: Tensor, temperatures: Tensor, fast: bool
    ) -> tuple[Tensor, Tensor]:
        keep = fast and any(ctx.needs_input_grad) and len(rows) * len(weight) <= MOST_KEPT
        chosen, entropies, kept = [], [], []
        for part in _chunks(len(rows)):
            logprobs = _logprobs(rows[part], weight, temperatures[part])
            chosen.append(logprobs.gather(1, labels[part, None]).squeeze(1))
            probabilities = logprobs.exp()
            entropies.append(-(probabilities * logprobs).sum(-1))
            if keep:
                kept.append(probabilities.to(torch.bfloat16))
        entropy = torch.cat(entropies)
        ctx.save_for_backward(rows, weight, labels, temperatures, entropy, *kept)
        ctx.fast = fast
        ctx.set_materialize_grads(False)
        return torch.cat(chosen), entropy

    @staticmethod
    def backward(ctx: Any, gradient: Tensor | None, by_entropy: Tensor | None) -> Any:
        """With z the logits over the temperature: d log p(y) / dz = 1(y) - p, and
        dH / dz = -p (log p + H)."""
        rows, weight, labels, temperatures, entropy, *kept = ctx.saved_tensors
        dtype = torch.bfloat16 if ctx.fast else torch.float32
        by_rows = torch.empty_like(rows)
        by_weight = torch.zeros_like(weight) if ctx.needs_input_grad[1] else None
        matrix, inputs = weight.to(dtype), rows.to(dtype)
        if gradient is None:
            gradient = torch.zeros_like(entropy)
        scale = gradient / temperatures
        for i, part in enumerate(_chunks(len(rows))):
            if kept:
                probabilities = kept[i].float()
            else:
                probabilities = _logprobs(rows[part], weight, temperatures[part]).exp_()
            factor = -scale[part, None]
            if by_entropy is not None:
                surprise = entropy[part, None] + probabilities.clamp_min(TINY).log()
                factor = factor - (by_entropy / temperatures)[part, None] * surprise
            slope = probabilities.mul_(factor)
            slope.scatter_add_(1, labels[part, None], scale[part, None])
            slope = slope.to(dtype)
            by_rows[part] = (slope @ matrix).to(by_rows.dtype)
            if by_weight is not None:
                by_weight += slope.T @ inputs[part]
        return by_rows, by_weight, None, None, None


def _chunks(count: int) -> list[slice]:
    return [slice(start, start + CHUNK) for start in range(0, count, CHUNK)]


def _logprobs(rows: Tensor, weight: Tensor, temperatures: Tensor) -> Tensor:
    logits = rows @ weight.T
    return torch.log_softmax(logits.div_(temperatures[:, None]), dim=-1)


def chosen_logprobs(
    rows: Tensor, weight: Tensor, labels: Tensor, temperatures: Tensor, *, fast: bool
) -> tuple[Tensor, Tensor]:
    """(log-probabilities [S] of the labels, entropies [S]), in nats, both with gradient.

    ``rows`` [S, H] float32, ``weight`` [V, H] float32 (of the output layer), ``labels`` [S] int64,
    ``temperatures`` [S]. ``fast``: bfloat16 in the backward pass.
    """
    chosen, entropies = _Chosen.apply(rows, weight, labels, temperatures, fast)
    return chosen, entropies
