"""Recipes: which advantage, loss, aggregation and correction go together, and the loss they make."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from rlcore.algorithms import policy_losses
from rlcore.algorithms.advantages import ADVANTAGES, Advantage
from rlcore.algorithms.aggregation import AGGREGATIONS, Aggregation, token_weights
from rlcore.algorithms.corrections import BOUNDS, CORRECTIONS, Bounds, Correction, mismatch_kl
from rlcore.algorithms.kl import k2, k3
from rlcore.algorithms.policy_losses import PolicyLoss
from rlcore.algorithms.segments import check_index
from rlcore.errors import PacelineError
from rlcore.trainer import LossOutput

Loss = Literal["ppo", "gspo", "cispo", "reinforce"]
KlEstimator = Literal["k2", "k3"]


class RecipeError(PacelineError):
    """A recipe that is not known, or whose parts do not go together."""


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """One way to turn rewards and log-probabilities into a loss. Raises RecipeError for bad values.

    Change a part with ``dataclasses.replace``, which checks again.

    ``clip_low``, ``clip_high``: distances of the ratio's bounds from 1; not used by ``reinforce``.
    ``dual_clip``: see ``policy_losses.ppo``; only for ``ppo``.
    ``correction_bounds``: None for the published ones of the correction.
    ``kl_coefficient``: of the KL to the reference policy, as a term of the loss; 0 needs no reference.
    ``kl_estimator``: k1 is not on offer, since its gradient averages to zero.
    ``entropy_coefficient``: of the policy's entropy, a bonus in the loss that keeps rollouts different; no
    published recipe here has one.
    ``overlong_buffer``: DAPO's penalty for length begins this share of the most tokens before the end;
    0 is none. ``dynamic_sampling``: groups whose rewards are all equal are replaced, not trained on.
    ``source``: where the values come from.
    """

    name: str
    source: str
    advantage: Advantage
    loss: Loss
    aggregation: Aggregation
    clip_low: float = 0.2
    clip_high: float = 0.2
    dual_clip: float | None = None
    correction: Correction = "token_tis"
    correction_bounds: Bounds | None = None
    kl_coefficient: float = 0.0
    kl_estimator: KlEstimator = "k3"
    entropy_coefficient: float = 0.0
    overlong_buffer: float = 0.0
    dynamic_sampling: bool = False

    def __post_init__(self) -> None:
        self._check_choice("advantage", self.advantage, tuple(ADVANTAGES))
        self._check_choice("loss", self.loss, get_args(Loss))
        self._check_choice("aggregation", self.aggregation, AGGREGATIONS)
        self._check_choice("correction", self.correction, tuple(CORRECTIONS))
        self._check_choice("kl_estimator", self.kl_estimator, get_args(KlEstimator))
        numbers = (
            "clip_low", "clip_high", "kl_coefficient", "entropy_coefficient", "overlong_buffer",
        )  # fmt: skip
        for field in numbers:
            self._check(field, vars(self)[field], _is_number(vars(self)[field]), "a number")
        self._check("clip_low", self.clip_low, 0 <= self.clip_low <= 1, "from 0 to 1")
        self._check("clip_high", self.clip_high, self.clip_high >= 0, "0 or more")
        if self.dual_clip is not None:
            high = 1 + self.clip_high
            fits = self.loss == "ppo" and _is_number(self.dual_clip) and self.dual_clip > high
            self._check("dual_clip", self.dual_clip, fits, f"above {high:g}, with the loss ppo")
        if self.correction_bounds is not None:
            self._check_bounds(self.correction_bounds)
        kl, buffer = self.kl_coefficient, self.overlong_buffer
        self._check("kl_coefficient", kl, kl >= 0, "0 or more")
        entropy = self.entropy_coefficient
        self._check("entropy_coefficient", entropy, entropy >= 0, "0 or more")
        self._check("overlong_buffer", buffer, 0 <= buffer <= 1, "a share, from 0 to 1")
        sampling = self.dynamic_sampling
        self._check("dynamic_sampling", sampling, isinstance(sampling, bool), "true or false")

    @property
    def bounds(self) -> Bounds:
        """The bounds of the correction's ratio."""
        return BOUNDS[self.correction] if self.correction_bounds is None else self.correction_bounds

    @property
    def needs_reference(self) -> bool:
        """Whether ``policy_loss`` needs the reference policy's log-probabilities."""
        return self.kl_coefficient > 0

    def _check_bounds(self, bounds: object) -> None:
        """A file gives a list where a tuple is meant. An infinite upper bound is none."""
        fits = (
            isinstance(bounds, (list, tuple))
            and len(bounds) == 2
            and all(isinstance(bound, (int, float)) for bound in bounds)
            and 0 <= bounds[0] < bounds[1]
        )
        self._check("correction_bounds", bounds, fits, "two numbers, 0 <= low < high")
        low, high = self.bounds
        object.__setattr__(self, "correction_bounds", (low, high))

    def _check_choice(self, field: str, value: str, choices: tuple[str, ...]) -> None:
        self._check(field, value, value in choices, f"one of {', '.join(choices)}")

    def _check(self, field: str, value: object, fits: bool, wanted: str) -> None:
        if not fits:
            raise RecipeError(f"recipe {self.name}: {field} is {value!r}; it must be {wanted}")


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and math.isfinite(value)


# The published recipes take generator and trainer to be one policy; here they are two programs, so all
# are given truncated importance sampling by token. It does nothing where the two agree.
RECIPES: dict[str, Recipe] = {
    recipe.name: recipe
    for recipe in (
        Recipe(
            name="grpo",
            source="Shao et al. 2024, DeepSeekMath",
            advantage="group_norm",
            loss="ppo",
            aggregation="sequence_mean",
            kl_coefficient=0.04,
        ),
        Recipe(
            name="dr_grpo",
            source="Liu et al. 2025, Understanding R1-Zero-Like Training",
            advantage="group_mean",
            loss="ppo",
            aggregation="constant_length",
        ),
        Recipe(
            name="dapo",
            source="Yu et al. 2025, DAPO (overlong buffer: 4,096 of 20,480 tokens)",
            advantage="group_norm",
            loss="ppo",
            aggregation="token_mean",
            clip_high=0.28,
            overlong_buffer=0.2,
            dynamic_sampling=True,
        ),
        Recipe(
            name="gspo",
            source="Zheng et al. 2025, Group Sequence Policy Optimization",
            advantage="group_norm",
            loss="gspo",
            aggregation="sequence_mean",
            clip_low=3e-4,
            clip_high=4e-4,
        ),
        Recipe(
            name="cispo",
            source="MiniMax 2025, MiniMax-M1; its bound is not published, 5 is that of "
            "Khatri et al. 2025, ScaleRL",
            advantage="group_norm",
            loss="cispo",
            aggregation="token_mean",
            clip_low=1.0,
            clip_high=4.0,
        ),
        Recipe(
            name="rloo",
            source="Ahmadian et al. 2024, Back to Basics (one update for each batch; the sum over "
            "tokens is divided by a constant, and KL is a term of the loss, not of the reward)",
            advantage="leave_one_out",
            loss="reinforce",
            aggregation="constant_length",
        ),
        Recipe(
            name="reinforce++",
            source="Hu 2025, REINFORCE++ (KL is a term of the loss, not of the reward)",
            advantage="batch_norm",
            loss="ppo",
            aggregation="sequence_mean",
        ),
        Recipe(
            name="reinforce++-baseline",
            source="Hu 2025, REINFORCE++ with baseline",
            advantage="group_mean_batch_norm",
            loss="ppo",
            aggregation="sequence_mean",
            kl_estimator="k2",
        ),
        Recipe(
            name="ppo",
            source="Schulman et al. 2017, PPO (the group's mean stands in for the critic)",
            advantage="group_mean_batch_norm",
            loss="ppo",
            aggregation="token_mean",
        ),
    )
}


def recipe_named(name: str) -> Recipe:
    """The published recipe; raises RecipeError, which lists the names."""
    if name not in RECIPES:
        raise RecipeError(f"no recipe {name!r}; choose one of {', '.join(RECIPES)}")
    return RECIPES[name]


def policy_loss(
    recipe: Recipe,
    *,
    logprobs: Tensor,
    old_logprobs: Tensor,
    inference_logprobs: Tensor,
    ref_logprobs: Tensor | None,
    advantages: Tensor,
    sequence: Tensor,
    max_tokens: int,
    entropies: Tensor | None = None,
) -> LossOutput:
    """The loss of one micro-batch, for the trainer to sum up. All tensors are [T].

    ``logprobs``: of the policy in training, with gradient, at temperature and processing of the
    sampling; ``old_logprobs``: the same before the first update on this batch (where there is only
    one, ``logprobs.detach()``); ``inference_logprobs``: as recorded in sampling; ``ref_logprobs``: of
    the reference policy, or None if the recipe needs none; ``advantages``: of each token's rollout;
    ``sequence``: the index of each token's rollout (int64), each of which is in one micro-batch as a
    whole; ``max_tokens``: the most that a rollout may sample; ``entropies``: of the policy in training,
    with gradient, which only a recipe with an entropy bonus needs.

    Metrics, each a mean over tokens: ``ratio``, ``clip_low`` and ``clip_high`` (shares), ``update_kl``
    (old to current policy), ``mismatch_kl`` and ``mismatch_k1``, ``correction`` (the weight),
    ``masked`` (share of weight 0), ``effective`` (share with an advantage and a weight), ``no_advantage``
    (share with an advantage of 0), ``entropy`` (estimated by the sampled tokens), ``reference_kl``.

    Raises BatchError for tensors that do not fit, RecipeError where a reference is missing.
    """
    if recipe.needs_reference and ref_logprobs is None:
        raise RecipeError(
            f"recipe {recipe.name} has a KL coefficient of {recipe.kl_coefficient:g} but there are no "
            "log-probabilities of a reference policy; give one, or set the coefficient to 0"
        )
    check_index(
        sequence,
        logprobs=logprobs,
        old_logprobs=old_logprobs,
        inference_logprobs=inference_logprobs,
        advantages=advantages,
    )
    logprobs, advantages = logprobs.float(), advantages.float()
    old, inference = old_logprobs.detach().float(), inference_logprobs.detach().float()
    policy = _token_loss(recipe, logprobs, old, advantages, sequence)
    correction = CORRECTIONS[recipe.correction](old, inference, sequence, recipe.bounds)
    loss = policy.loss * correction
    mismatch_k1, mismatch_k3 = mismatch_kl(old, inference)
    by_token = {
        "ratio": policy.ratio,
        "clip_low": policy.clipped_low,
        "clip_high": policy.clipped_high,
        "update_kl": k3(old, logprobs.detach()),
        "mismatch_kl": mismatch_k3,
        "mismatch_k1": mismatch_k1,
        "correction": correction,
        "masked": correction == 0,
        "effective": (advantages != 0) & (correction != 0),
        "no_advantage": advantages == 0,
        "entropy": -inference,
    }
    if ref_logprobs is not None:
        check_index(sequence, ref_logprobs=ref_logprobs)
        reference = ref_logprobs.detach().float()
        by_token["reference_kl"] = k3(logprobs.detach(), reference)
        if recipe.needs_reference:
            estimate = k2 if recipe.kl_estimator == "k2" else k3
            loss = loss + recipe.kl_coefficient * estimate(logprobs, reference)
    if recipe.entropy_coefficient > 0:
        if entropies is None:
            raise RecipeError(
                f"recipe {recipe.name} has an entropy bonus but was given no entropies"
            )
        check_index(sequence, entropies=entropies)
        loss = loss - recipe.entropy_coefficient * entropies.float()
    weights, normaliser = token_weights(recipe.aggregation, sequence, max_tokens)
    sums = torch.stack([value.double().sum() for value in by_token.values()]).tolist()
    metrics = {
        name: (total, float(len(sequence))) for name, total in zip(by_token, sums, strict=True)
    }
    return LossOutput((loss * weights).sum(), normaliser, metrics)


def _token_loss(
    recipe: Recipe, logprobs: Tensor, old: Tensor, advantages: Tensor, sequence: Tensor
) -> PolicyLoss:
    low, high = recipe.clip_low, recipe.clip_high
    match recipe.loss:
        case "ppo":
            return policy_losses.ppo(logprobs, old, advantages, low, high, recipe.dual_clip)
        case "gspo":
            return policy_losses.gspo(logprobs, old, advantages, sequence, low, high)
        case "cispo":
            return policy_losses.cispo(logprobs, old, advantages, low, high)
        case "reinforce":
            return policy_losses.reinforce(logprobs, old, advantages)
