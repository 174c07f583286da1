"""The mathematics of draft learning: distillation on committed positions, and acceptance."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from learner.batch import SpanBatch
from learner.drafters.base import Drafter
from rlcore.trainer import LossOutput


def target_logprobs(last: Tensor, lm_head_rows: Tensor, lse: Tensor) -> Tensor:
    """log p of the target over the draft vocabulary D, [..., V_draft].

    log p(v) = last . W_v - lse, with ``last`` [..., H] the target's final hidden state, W_v the
    rows of its lm_head for v in D, and ``lse`` [...] the logsumexp over the whole vocabulary,
    stored by the engine. So exp() of it sums to P(D) <= 1, and no product with the whole lm_head is
    needed. Where ``lse`` is NaN, p is taken to lie inside D (P(D) = 1).
    """
    logits = (last @ lm_head_rows.T).float()
    inside = torch.logsumexp(logits, dim=-1)
    return logits - torch.where(lse.isnan(), inside, lse).unsqueeze(-1)


class _SoftCrossEntropy(torch.autograd.Function):
    """Forward computes the gradient at once: one pass over the logits instead of four."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, p: Tensor, mass: Tensor, weight: Tensor) -> Tensor:
        logits = logits.float()
        lse = torch.logsumexp(logits, dim=-1)
        loss = mass * lse - torch.linalg.vecdot(p, logits)
        grad = torch.exp(logits - lse.unsqueeze(-1)).mul_((mass * weight).unsqueeze(-1))
        ctx.save_for_backward(grad.addcmul_(p, weight.unsqueeze(-1), value=-1.0))
        return torch.dot(loss, weight)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None, None, None]:
        (grad,) = ctx.saved_tensors
        return grad * grad_outputs[0], None, None, None


def soft_cross_entropy(logits: Tensor, p: Tensor, weight: Tensor) -> Tensor:
    """sum_i weight_i * -sum_{v in D} p_i(v) log q_i(v), a scalar; q = softmax(logits).

    Up to the entropy of p this is P(D) times the forward KL from p renormalised over D: a row
    counts by how much of the target's mass the draft vocabulary can reach. logits, p [M, V]; weight
    [M].
    """
    result: Tensor = _SoftCrossEntropy.apply(logits, p, p.sum(-1), weight)
    return result


def acceptance(drafter: Drafter, batch: SpanBatch, steps: int) -> tuple[Tensor, Tensor]:
    """(matches, mask), [N, steps] bool each: proposal j of each anchor is the committed token.

    The engine drafts greedily (q is one-hot at d = argmax q), so it accepts d with probability
    p(d), p being the distribution that the emitted token x was drawn from. Given the prefix, x ~ p
    does not depend on d (rejection sampling keeps the output distribution), so E[1{x = d}] = p(d):
    the match is an unbiased estimate of acceptance for a sampled target, and acceptance itself for
    a greedy one. It is read along the committed tokens, which are the drafter's own up to its first
    mismatch; behind that the path has ended, and only products of matches mean anything. A token
    outside the draft vocabulary is never proposed and counts as a rejection.
    """
    hidden = drafter.unroll(batch, steps)
    matches = torch.stack(
        [drafter.propose(h) == batch.tokens_after(2 + j) for j, h in enumerate(hidden)], dim=1
    )
    mask = torch.stack([batch.judged(j) for j in range(steps)], dim=1)
    return matches & mask, mask


def expected_length(matches: Tensor) -> Tensor:
    """L = 1 + sum_k prod_{i<=k} match_i of each anchor, [N]; matches [N, steps]."""
    return 1 + matches.long().cumprod(dim=1).sum(dim=1)


@dataclass(frozen=True)
class DistillObjective:
    """Soft cross-entropy over an unroll of ``steps`` draft steps, for the Trainer.

    loss = sum_j decay^j sum_t m_j(t) CE_j(t)  /  sum_j decay^j sum_t m_j(t)

    CE_j(t) compares draft step j of anchor t with the target at row t+1+j. m_j(t) is 1 where that
    row exists; with ``path="accepted"`` it is also 0 behind the anchor's first mismatch, where the
    engine would have stopped. ``lm_head_rows`` [V_draft, H] are the target's rows for the
    drafter's vocabulary.
    """

    lm_head_rows: Tensor
    steps: int = 3
    decay: float = 0.9
    path: Literal["all", "accepted"] = "all"

    def __call__(self, module: Drafter, batch: SpanBatch, /) -> LossOutput:
        steps = self.steps if module.reads_own_states else 1
        anchors = len(batch.anchor_row)
        if anchors == 0:
            return LossOutput(torch.zeros(()), 0.0)
        # Steps of neighbouring anchors share target rows: compute each row's p once.
        used = torch.zeros_like(batch.loss_mask)
        rows = []
        for j in range(steps):
            row = (batch.anchor_row + 1 + j).clamp(max=used.shape[1] - 1)
            judged = batch.judged(j)
            used[batch.anchor_span[judged], row[judged]] = True
            rows.append(row)
        place = used.flatten().cumsum(0).view(used.shape) - 1
        p = target_logprobs(batch.last[used], self.lm_head_rows, batch.lse[used]).exp_()
        mass = p.sum(-1)

        alive = torch.ones(anchors, dtype=torch.bool)
        loss = torch.zeros(())
        weight = 0.0
        metrics: dict[str, tuple[float, float]] = {}
        for j, hidden in enumerate(module.unroll(batch, steps)):
            logits = module.logits(hidden)
            judged = batch.judged(j)
            index = place[batch.anchor_span, rows[j]]
            counted = judged & alive if self.path == "accepted" else judged
            factor = self.decay**j * counted.float()
            loss = loss + _SoftCrossEntropy.apply(logits, p[index], mass[index], factor)
            weight += float(factor.sum())
            proposed = module.vocab[logits.detach().argmax(-1)]
            reached = judged & alive
            alive = reached & (proposed == batch.tokens_after(2 + j))
            metrics[f"accept_{j}"] = (float(alive.sum()), float(reached.sum()))
        metrics["coverage"] = (float(mass.sum()), float(len(mass)))
        return LossOutput(loss, weight, metrics)
