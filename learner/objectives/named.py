"""The objectives by name: what can be asked for, and what the laboratory compares."""

from __future__ import annotations

from dataclasses import dataclass

from learner.objectives.losses import (
    AcceptReject,
    CommittedTokens,
    ExpectedLength,
    ForwardKL,
    Hybrid,
    Loss,
    Mixture,
    PushDown,
    TotalVariation,
    WorthKL,
)
from learner.objectives.outcomes import OutcomeWeights
from rlcore.errors import PacelineError


class ObjectiveError(PacelineError):
    """There is no objective of that name."""


@dataclass(frozen=True)
class Recipe:
    """A loss, and how the outcomes of served drafts weigh in it (None: not at all)."""

    note: str
    loss: Loss
    outcomes: OutcomeWeights | None = None


KL, VARIATION, LENGTH = ForwardKL(), TotalVariation(), ExpectedLength("overlap")

RECIPES: dict[str, Recipe] = {
    # from the target's distribution
    "kl": Recipe("forward KL, step weights 0.9^j", KL),
    "kl-sharp": Recipe("forward KL from p squared, renormalised", ForwardKL(sharpness=2.0)),
    "kl-worth": Recipe("forward KL, step weights dE[L]/da of the drafter itself", WorthKL()),
    "kl-committed": Recipe("half KL, half likelihood", Mixture(KL, CommittedTokens(), 0.5)),
    "tv": Recipe("total variation", VARIATION),
    "tv-log": Recipe("-log of the overlap of p and q", TotalVariation(log=True)),
    "length": Recipe("E[L], both sides sampled: a = sum min(p, q)", LENGTH),
    "length-matching": Recipe("E[L], a = sum p q", ExpectedLength("matching")),
    "length-agreement": Recipe("E[L], a = q(argmax p)", ExpectedLength("agreement")),
    "hybrid-tv": Recipe("KL to total variation as acceptance grows", Hybrid(KL, VARIATION)),
    "hybrid-length": Recipe("KL to E[L] as acceptance grows", Hybrid(KL, LENGTH)),
    # from token ids alone
    "committed": Recipe("likelihood of the committed tokens", CommittedTokens()),
    "length-committed": Recipe("E[L], a = q(committed token)", ExpectedLength("committed")),
    # from accept/reject outcomes alone
    "accept-reject": Recipe("policy gradient, and the target's replacements", AcceptReject()),
    "accept-reject-bare": Recipe("policy gradient on drafts only", AcceptReject(False)),
    # from the distribution and outcomes
    "kl-path": Recipe(
        "KL, drafts behind a rejected position count 0.3", KL, OutcomeWeights(behind=0.3)
    ),
    "kl-worth-served": Recipe(
        "kl-worth, its chances half from what became of the served drafts", WorthKL(trust=0.5)
    ),
    "kl-rejected-more": Recipe("KL, rejected positions twice", KL, OutcomeWeights(rejected=2.0)),
    "kl-rejected-less": Recipe("KL, rejected positions half", KL, OutcomeWeights(rejected=0.5)),
    "kl-stood": Recipe("KL, passed anchors half", KL, OutcomeWeights(passed=0.5)),
    "kl-hard": Recipe(
        "KL, rejected positions twice, accepted and passed ones half",
        KL,
        OutcomeWeights(rejected=2.0, accepted=0.5, passed=0.5),
    ),
    "kl-accept-reject": Recipe("KL, and a fifth accept-reject", Mixture(KL, AcceptReject(), 0.2)),
    "kl-push": Recipe("KL, and rejected drafts pushed down", PushDown(KL)),
}
"""Every objective that can be asked for."""


def recipe(name: str) -> Recipe:
    """Raises ObjectiveError, which names those there are."""
    if name not in RECIPES:
        raise ObjectiveError(f"no objective named {name!r}; there are {', '.join(RECIPES)}")
    return RECIPES[name]
