"""The losses of draft learning, all over the same unrolled logits (chances.py has the notation)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from learner.objectives.chances import (
    Acceptance,
    Unrolled,
    chance_of,
    chances,
    drafted_length,
    worth,
)
from learner.objectives.outcomes import ACCEPTED, UNKNOWN


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


class Loss(Protocol):
    """A summed loss, and the weight that the sum is to be divided by."""

    def __call__(self, batch: Unrolled, /) -> tuple[Tensor, float]: ...


def _decayed(batch: Unrolled, decay: float) -> Tensor:
    return batch.weight * decay ** torch.arange(batch.steps)


def _cross_entropy(batch: Unrolled, p: Tensor, weight: Tensor) -> Tensor:
    mass = p.sum(-1)
    parts: list[Tensor] = [
        _SoftCrossEntropy.apply(
            batch.logits[step], p[batch.row[:, step]], mass[batch.row[:, step]], weight[:, step]
        )
        for step in range(batch.steps)
    ]
    return torch.stack(parts).sum()


@dataclass(frozen=True)
class ForwardKL:
    """sum_j decay^j CE(p, q_j). ``sharpness`` s trains towards p^s renormalised to the same mass:
    a greedy draft needs the likeliest token, not the whole distribution."""

    decay: float = 0.9
    sharpness: float = 1.0

    def __call__(self, batch: Unrolled, /) -> tuple[Tensor, float]:
        weight = _decayed(batch, self.decay)
        p = batch.p if self.sharpness == 1.0 else sharpened(batch.p, self.sharpness)
        return _cross_entropy(batch, p, weight), float(weight.sum())


def sharpened(p: Tensor, sharpness: float) -> Tensor:
    """p^s, scaled back to the row's mass."""
    mass = p.sum(-1, keepdim=True)
    powered = (p / p.amax(-1, keepdim=True)).pow_(sharpness)
    return powered.mul_(mass / powered.sum(-1, keepdim=True))


@dataclass(frozen=True)
class WorthKL:
    """Cross-entropy whose step weights are what a better draft is worth now, dE[L]/da_j, instead of
    a fixed decay.

    The chances in it are the drafter's own (detached) acceptance; where a served draft was verified,
    ``trust`` of the chance is what became of that one: 1 accepted, 0 rejected.
    """

    form: Acceptance = "overlap"
    trust: float = 0.0

    def __call__(self, batch: Unrolled, /) -> tuple[Tensor, float]:
        with torch.no_grad():
            chance = chances(batch, self.form)
            if self.trust > 0:
                verdicts = batch.outcomes.verdicts(batch.judged)
                served = torch.lerp(chance, (verdicts == ACCEPTED).float(), self.trust)
                chance = torch.where(verdicts == UNKNOWN, chance, served)
            weight = batch.weight * worth(chance)
        return _cross_entropy(batch, batch.p, weight), float(weight.sum())


@dataclass(frozen=True)
class TotalVariation:
    """sum_j decay^j (1 - overlap), or with ``log`` -log overlap: the same direction, stronger where
    little is accepted yet."""

    decay: float = 0.9
    log: bool = False

    def __call__(self, batch: Unrolled, /) -> tuple[Tensor, float]:
        weight = _decayed(batch, self.decay)
        found = chances(batch, "overlap")
        loss = -torch.log(found.clamp(min=1e-6)) if self.log else 1 - found
        return (loss * weight).sum(), float(weight.sum())


@dataclass(frozen=True)
class ExpectedLength:
    """-E[L], with the gradient through the whole product; an anchor counts as its first draft."""

    form: Acceptance = "overlap"

    def __call__(self, batch: Unrolled, /) -> tuple[Tensor, float]:
        weight = batch.weight[:, 0]
        missing = batch.steps - drafted_length(chances(batch, self.form))
        return torch.dot(missing, weight), float(weight.sum())


@dataclass(frozen=True)
class CommittedTokens:
    """sum_j decay^j -log q_j(x): needs token ids only, no distribution and no outcome."""

    decay: float = 0.9

    def __call__(self, batch: Unrolled, /) -> tuple[Tensor, float]:
        weight = _decayed(batch, self.decay) * (batch.committed >= 0)
        loss = [
            torch.nn.functional.cross_entropy(
                logits.float(), batch.committed[:, step].clamp(min=0), reduction="none"
            )
            for step, logits in enumerate(batch.logits)
        ]
        return (torch.stack(loss, dim=1) * weight).sum(), float(weight.sum())


@dataclass(frozen=True)
class Mixture:
    """``share`` of the second loss, the rest of the first."""

    first: Loss
    second: Loss
    share: float

    def __call__(self, batch: Unrolled, /) -> tuple[Tensor, float]:
        (one, weight), (two, other) = self.first(batch), self.second(batch)
        scale = weight / other if other else 0.0
        return (1 - self.share) * one + self.share * scale * two, weight


@dataclass(frozen=True)
class Hybrid:
    """From ``first`` to ``second`` as acceptance grows: the share of ``first`` is exp(-eta A), A the
    batch's mean (detached) chance of a draft."""

    first: Loss
    second: Loss
    eta: float = 3.0

    def __call__(self, batch: Unrolled, /) -> tuple[Tensor, float]:
        with torch.no_grad():
            found = chances(batch, "overlap").sum() / batch.judged.sum().clamp(min=1)
        return Mixture(self.first, self.second, 1 - math.exp(-self.eta * float(found)))(batch)


@dataclass(frozen=True)
class AcceptReject:
    """Policy gradient on the logged drafts alone, with no target distribution.

    On the path of a served step, draft j earned the reward 1 when it was accepted and 0 when it was
    the first rejected one; the baseline b_j is the batch's mean reward at j. The surrogate is
    -(r - b_j) log q_j(draft). A rejected draft pushes by log(1 - q) instead (bounded where log q is
    not). With ``replacement``, the token that the target put in its place (or emitted in a step
    without drafts) is learned as well.
    """

    replacement: bool = True

    def __call__(self, batch: Unrolled, /) -> tuple[Tensor, float]:
        served, step = batch.outcomes, torch.arange(batch.steps)
        inside = batch.judged & (step < served.drafted.unsqueeze(1))
        known = batch.committed >= 0
        won = inside & known & (step < served.accepted.unsqueeze(1))
        ends = step == served.accepted.unsqueeze(1)
        lost = inside & ends & (batch.rejected >= 0).unsqueeze(1)
        corrected = batch.judged & known & ends & ~served.passed.unsqueeze(1)
        reached = (won | lost).sum(0).clamp(min=1)
        baseline = won.sum(0) / reached
        loss = torch.zeros(())
        for j, logits in enumerate(batch.logits):
            drawn = torch.where(won[:, j], batch.committed[:, j], batch.rejected).clamp(min=0)
            given = torch.log_softmax(logits.float(), dim=-1)
            log_q = given.gather(-1, drawn.unsqueeze(-1)).squeeze(-1)
            unlike = torch.log1p(-log_q.exp().clamp(max=1 - 1e-4))
            gain = won[:, j] * (1 - baseline[j]) * log_q + lost[:, j] * baseline[j] * unlike
            if self.replacement:
                placed = batch.committed[:, j].clamp(min=0).unsqueeze(-1)
                gain = gain + corrected[:, j] * given.gather(-1, placed).squeeze(-1)
            loss = loss - gain.sum()
        counted = won | lost | corrected if self.replacement else won | lost
        return loss, float(counted.sum())


@dataclass(frozen=True)
class PushDown:
    """``base``, and ``strength`` times -log(1 - q(d)) for each first rejected draft d served."""

    base: Loss
    strength: float = 0.5

    def __call__(self, batch: Unrolled, /) -> tuple[Tensor, float]:
        loss, weight = self.base(batch)
        for step, logits in enumerate(batch.logits):
            hit = batch.judged[:, step] & (batch.outcomes.accepted == step) & (batch.rejected >= 0)
            chance = chance_of(logits[hit], batch.rejected[hit])
            unlike = torch.log1p(-chance.clamp(max=1 - 1e-4))
            loss = loss - self.strength * unlike.sum()
        return loss, weight
