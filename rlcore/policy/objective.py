"""The trainer's objective for policies: a recipe's loss over packed rows."""

from __future__ import annotations

import dataclasses

import torch
from torch import nn

from rlcore.algorithms.recipes import Recipe, policy_loss
from rlcore.policy.model import sampled_logprobs
from rlcore.policy.packing import PolicyBatch
from rlcore.trainer import LossOutput


class PolicyObjective:
    """Called by ``rlcore.trainer.Trainer`` with the policy and one micro-batch."""

    def __init__(self, recipe: Recipe, max_tokens: int, reference: nn.Module | None) -> None:
        """``max_tokens``: the most that a rollout may sample. ``reference``: frozen, for the KL."""
        self._recipe = recipe
        self._max_tokens = max_tokens
        self._reference = reference

    def __call__(self, module: nn.Module, batch: PolicyBatch, /) -> LossOutput:
        logprobs, entropies = sampled_logprobs(module, batch)
        reference = None
        if self._reference is not None:
            with torch.no_grad():
                reference, _ = sampled_logprobs(self._reference, batch)
        old = logprobs.detach() if batch.old_logprobs is None else batch.old_logprobs
        output = policy_loss(
            self._recipe,
            logprobs=logprobs,
            old_logprobs=old,
            inference_logprobs=batch.inference_logprobs,
            ref_logprobs=reference,
            advantages=batch.advantages,
            sequence=batch.sequence,
            max_tokens=self._max_tokens,
        )
        exact = {"policy_entropy": (float(entropies.sum()), float(len(entropies)))}
        return dataclasses.replace(output, metrics={**output.metrics, **exact})


@torch.no_grad()
def with_old_logprobs(module: nn.Module, batch: PolicyBatch) -> PolicyBatch:
    """The batch with the present policy's log-probabilities, for more than one update on it."""
    return dataclasses.replace(batch, old_logprobs=sampled_logprobs(module, batch)[0])
