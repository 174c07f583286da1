"""An unroll as the losses read it, and how likely its drafts are to be accepted.

Notation: at draft step j of an anchor, q is the drafter's distribution and p the target's, both over
the draft vocabulary D (p sums to P(D) <= 1), x the committed token. With a_j the chance that draft j
is accepted, given that it is reached, the expected acceptance length is E[L] = 1 + sum_k prod_{j<=k}
a_j, and dE[L]/da_j = (prod_{i<j} a_i)(1 + a_{j+1} + a_{j+1} a_{j+2} + ...) is what a better a_j is
worth.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from learner.objectives.outcomes import Outcomes


@dataclass(frozen=True)
class Unrolled:
    """K draft steps of N anchors, as every loss reads them.

    logits     K of [N, D]  the drafter's, with gradient
    p          [R, D]       the target's, one row for each position that some step is judged by
    row        [N, K]       which of the R rows judges the step
    judged     [N, K]       bool: the step counts at all
    weight     [N, K]       how much; 0 where it is not judged
    committed  [N, K]       place of the committed token in the draft vocabulary, -1 when outside
    rejected   [N]          the same for the first rejected draft that was served, -1 when none
    outcomes                what became of the served drafts
    """

    logits: list[Tensor]
    p: Tensor
    row: Tensor
    judged: Tensor
    weight: Tensor
    committed: Tensor
    rejected: Tensor
    outcomes: Outcomes

    @property
    def steps(self) -> int:
        return len(self.logits)

    def target(self, step: int) -> Tensor:
        """[N, D]: p at the step."""
        return self.p[self.row[:, step]]


def overlap(batch: Unrolled, step: int) -> Tensor:
    """sum_v min(p(v), q(v)) = 1 - total variation: acceptance when both sides are sampled."""
    q = torch.softmax(batch.logits[step].float(), dim=-1)
    return torch.minimum(q, batch.target(step)).sum(-1)


def matching(batch: Unrolled, step: int) -> Tensor:
    """sum_v p(v) q(v): acceptance of one draft drawn from q. Its maximum is the greedy draft argmax
    p, which is why it stands in for p(argmax q), whose gradient is zero."""
    q = torch.softmax(batch.logits[step].float(), dim=-1)
    return torch.linalg.vecdot(batch.target(step), q)


def agreement(batch: Unrolled, step: int) -> Tensor:
    """q(argmax p): the same when the target is greedy; without the pull of unlikely tokens."""
    best = batch.target(step).argmax(-1)
    return chance_of(batch.logits[step], best)


def committed(batch: Unrolled, step: int) -> Tensor:
    """q(x), 0 for x outside D: ``matching`` with the emitted token in place of p. Needs no p."""
    place = batch.committed[:, step]
    return torch.where(place >= 0, chance_of(batch.logits[step], place.clamp(min=0)), 0.0)


ACCEPTANCES: dict[str, Callable[[Unrolled, int], Tensor]] = {
    "overlap": overlap,
    "matching": matching,
    "agreement": agreement,
    "committed": committed,
}
Acceptance = Literal["overlap", "matching", "agreement", "committed"]


def chance_of(logits: Tensor, place: Tensor) -> Tensor:
    logits = logits.float()
    chosen = logits.gather(-1, place.unsqueeze(-1)).squeeze(-1)
    return torch.exp(chosen - torch.logsumexp(logits, dim=-1))


def chances(batch: Unrolled, form: Acceptance) -> Tensor:
    """[N, K]; 0 where a step is not judged, so that no length grows past the known tokens."""
    found = [ACCEPTANCES[form](batch, step) for step in range(batch.steps)]
    return torch.where(batch.judged, torch.stack(found, dim=1), 0.0)


def drafted_length(chance: Tensor) -> Tensor:
    """sum_k prod_{j<=k} a_j, [N]: the expected number of accepted drafts; chance [N, K]."""
    return chance.cumprod(dim=1).sum(dim=1)


def worth(chance: Tensor) -> Tensor:
    """dE[L]/da_j, [N, K]: chance to be reached, times one plus what is accepted behind it."""
    reach = torch.cat([torch.ones_like(chance[:, :1]), chance.cumprod(dim=1)[:, :-1]], dim=1)
    behind = torch.zeros_like(chance[:, 0])
    columns = []
    for step in reversed(range(chance.shape[1])):
        columns.append(1 + behind)
        behind = chance[:, step] * (1 + behind)
    return reach * torch.stack(columns[::-1], dim=1)
