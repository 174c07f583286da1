"""Draft learning as the Trainer sees it: an unroll compared with the target; and acceptance."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from learner.batch import SpanBatch
from learner.drafters.base import Drafter
from learner.objectives.chances import Unrolled
from learner.objectives.losses import ForwardKL, Loss, soft_cross_entropy
from learner.objectives.outcomes import OutcomeWeights, ServedBatch, nothing_served
from rlcore.trainer import LossOutput

__all__ = [
    "DistillObjective",
    "acceptance",
    "expected_length",
    "soft_cross_entropy",
    "target_logprobs",
]


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
    """A loss over an unroll of ``steps`` draft steps, for the Trainer.

    Draft step j of anchor t is compared with the target at row t+1+j, where that row exists.
    ``lm_head_rows`` [V_draft, H] are the target's rows for the drafter's vocabulary. With
    ``outcomes``, a step's weight depends on what became of the drafts that were served there; a
    batch that does not tell (a plain SpanBatch) counts as one in which nothing was drafted.
    """

    lm_head_rows: Tensor
    steps: int = 3
    loss: Loss = field(default_factory=ForwardKL)
    outcomes: OutcomeWeights | None = None

    def __call__(self, module: Drafter, batch: SpanBatch, /) -> LossOutput:
        if len(batch.anchor_row) == 0:
            return LossOutput(torch.zeros(()), 0.0)
        unrolled = self.unroll(module, batch)
        loss, weight = self.loss(unrolled)
        return LossOutput(loss, weight, _metrics(unrolled))

    def unroll(self, module: Drafter, batch: SpanBatch) -> Unrolled:
        steps = self.steps if module.reads_own_states else 1
        judged = torch.stack([batch.judged(j) for j in range(steps)], dim=1)
        # Steps of neighbouring anchors share target rows: compute each row's p once.
        used = torch.zeros_like(batch.loss_mask)
        rows = batch.anchor_row.unsqueeze(1) + 1 + torch.arange(steps)
        rows = rows.clamp(max=used.shape[1] - 1)
        span = batch.anchor_span.unsqueeze(1).expand_as(rows)
        used[span[judged], rows[judged]] = True
        place = used.flatten().cumsum(0).view(used.shape) - 1
        served = batch.outcomes if isinstance(batch, ServedBatch) else nothing_served(len(judged))
        if not module.reads_own_states:
            served = served.by_position()
        weight = judged.float()
        if self.outcomes is not None:
            weight = weight * self.outcomes.of(served, judged)
        tokens = torch.stack([batch.tokens_after(2 + j) for j in range(steps)], dim=1)
        return Unrolled(
            logits=[module.logits(hidden) for hidden in module.unroll(batch, steps)],
            p=target_logprobs(batch.last[used], self.lm_head_rows, batch.lse[used]).exp_(),
            row=place[span, rows].clamp(min=0),
            judged=judged,
            weight=weight,
            committed=places(module.vocab, tokens),
            rejected=places(module.vocab, served.rejected),
            outcomes=served,
        )


def places(vocab: Tensor, tokens: Tensor) -> Tensor:
    """Index of each target id in the ascending ``vocab``, -1 where it is not in it."""
    place = torch.searchsorted(vocab, tokens).clamp(max=len(vocab) - 1)
    return torch.where(vocab[place] == tokens, place, -1)


@torch.no_grad()
def _metrics(unrolled: Unrolled) -> dict[str, tuple[float, float]]:
    """Greedy acceptance by step along the committed tokens, and the target's mass inside D."""
    alive = torch.ones(len(unrolled.judged), dtype=torch.bool)
    metrics: dict[str, tuple[float, float]] = {}
    for j, logits in enumerate(unrolled.logits):
        reached = unrolled.judged[:, j] & alive
        alive = reached & (logits.argmax(-1) == unrolled.committed[:, j])
        metrics[f"accept_{j}"] = (float(alive.sum()), float(reached.sum()))
    metrics["coverage"] = (float(unrolled.p.sum()), float(len(unrolled.p)))
    return metrics
