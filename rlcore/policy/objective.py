"""The trainer's objective for policies: a recipe's loss over packed rows."""

from __future__ import annotations

import dataclasses

import torch
from torch import nn

from rlcore.algorithms.corrections import mismatch_kl
from rlcore.algorithms.recipes import Recipe, policy_loss
from rlcore.policy.model import sampled_logprobs
from rlcore.policy.packing import PolicyBatch
from rlcore.trainer import LossOutput


class PolicyObjective:
    """Called by ``rlcore.trainer.Trainer`` with the policy and one micro-batch."""

    def __init__(
        self, recipe: Recipe, max_tokens: int, reference: nn.Module | None, fast: bool
    ) -> None:
        """``max_tokens``: the most that a rollout may sample. ``reference``: frozen, for the KL.

        ``fast``: as in ``sampled_logprobs``.
        """
        self._fast = fast
        self._recipe = recipe
        self._max_tokens = max_tokens
        self._reference = reference

    def __call__(self, module: nn.Module, batch: PolicyBatch, /) -> LossOutput:
        logprobs, entropies = sampled_logprobs(module, batch, fast=self._fast)
        reference = None
        if self._reference is not None:
            with torch.no_grad():
                reference, _ = sampled_logprobs(self._reference, batch, fast=self._fast)
        old = logprobs.detach() if batch.old_logprobs is None else batch.old_logprobs
        output = policy_loss(
            self._recipe,
            logprobs=logprobs,
            old_logprobs=old,
            inference_logprobs=batch.inference_logprobs,
            ref_logprobs=reference,
            advantages=batch.advantages,
            sequence=batch.sequence,
            entropies=entropies,
            max_tokens=self._max_tokens,
        )
        exact = {"policy_entropy": (float(entropies.detach().sum()), float(len(entropies)))}
        now = batch.on_policy
        if now.any():
            _, mismatch = mismatch_kl(old[now], batch.inference_logprobs[now])
            exact["mismatch_kl_on_policy"] = (float(mismatch.sum()), float(now.sum()))
        return dataclasses.replace(output, metrics={**output.metrics, **exact})

    @torch.no_grad()
    def with_old_logprobs(self, module: nn.Module, batch: PolicyBatch) -> PolicyBatch:
        """With the present policy's log-probabilities, for more than one update on a batch."""
        logprobs, _ = sampled_logprobs(module, batch, fast=self._fast)
        return dataclasses.replace(batch, old_logprobs=logprobs)
