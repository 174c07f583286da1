"""Losses and gradients agree with TRL's GRPOTrainer, whose own loss code is run on the same numbers.

The trainer is made without a model: its log-probabilities are a leaf tensor, so that gradients are
compared where they leave the loss.
"""

from __future__ import annotations

import warnings
from collections import defaultdict
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from rlcore.algorithms.recipes import RECIPES, policy_loss
from tests.rlcore.algorithms.batches import random_batch

LENGTHS = [5, 1, 9, 3, 7, 2]
MAX_TOKENS = 12


@pytest.fixture(scope="module")
def grpo_trainer():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # on the versions of vLLM that it knows
        from trl.trainer.grpo_trainer import GRPOTrainer
    return GRPOTrainer


class Accelerator:
    num_processes = 1

    def gather(self, value):
        return value

    def reduce(self, value, reduction):
        return value


def padded(values, fill=0.0):
    """[T] to [sequences, longest]."""
    return torch.nn.utils.rnn.pad_sequence(
        list(values.split(LENGTHS)), batch_first=True, padding_value=fill
    )


def loss_of_trl(
    trainer_class,
    batch,
    loss_type,
    level="token",
    low=0.2,
    high=0.2,
    delta=None,
    beta=0.0,
    ratio=None,
):
    """Loss, gradient [T] and metrics. ``ratio`` [T]: the importance weights of vLLM's samples."""
    trainer = trainer_class.__new__(trainer_class)
    logprobs = padded(batch.logprobs.detach()).requires_grad_()
    trainer._get_per_token_logps_and_entropies = lambda *args, **kwargs: (
        logprobs,
        torch.zeros_like(logprobs),
        None,
    )
    trainer.accelerator = Accelerator()
    trainer.args = SimpleNamespace(
        delta=delta, use_bias_correction_kl=False, steps_per_generation=1
    )
    trainer.aux_loss_enabled = False
    trainer.beta = beta
    trainer.current_gradient_accumulation_steps = 1
    trainer.epsilon_low, trainer.epsilon_high = low, high
    trainer.importance_sampling_level = level
    trainer.loss_type = loss_type
    trainer.max_completion_length = MAX_TOKENS
    trainer.model = SimpleNamespace(training=True)
    trainer.off_policy_mask_threshold = None
    trainer.top_entropy_quantile = 1.0
    trainer.use_vllm = trainer.vllm_importance_sampling_correction = ratio is not None
    trainer._entropy_bonus_enabled = False
    trainer._metrics = {"train": defaultdict(list)}
    mask = padded(torch.ones(len(batch.sequence)))
    ids = torch.zeros(mask.shape, dtype=torch.int64)
    inputs = {
        "prompt_ids": ids[:, :1],
        "prompt_mask": mask[:, :1],
        "completion_ids": ids,
        "completion_mask": mask,
        "advantages": padded(batch.advantages)[:, 0],
        "old_per_token_logps": padded(batch.old_logprobs),
        "ref_per_token_logps": padded(batch.ref_logprobs),
        "num_items_in_batch": mask.sum(),
    }
    if ratio is not None:
        inputs["importance_sampling_ratio"] = padded(ratio)
    loss = trainer._compute_loss(None, inputs)
    loss.backward()
    assert logprobs.grad is not None
    return loss.detach(), logprobs.grad[mask.bool()], trainer._metrics["train"]


def loss_of_ours(recipe, batch):
    output = policy_loss(recipe, **batch.arguments(), max_tokens=MAX_TOKENS)
    (output.loss_sum / output.weight).backward()
    metrics = {name: total / weight for name, (total, weight) in output.metrics.items()}
    return output.loss_sum.detach() / output.weight, batch.logprobs.grad, metrics


CASES = {
    "grpo": ({"kl_coefficient": 0.0}, {"loss_type": "grpo"}),
    "grpo with KL": ({"kl_coefficient": 0.04}, {"loss_type": "grpo", "beta": 0.04}),
    "dr_grpo": ({}, {"loss_type": "dr_grpo"}),
    "dapo": ({}, {"loss_type": "dapo", "high": 0.28}),
    "dapo with dual clip": (
        {"dual_clip": 1.35},
        {"loss_type": "dapo", "high": 0.28, "delta": 1.35},
    ),
    "dapo with KL": ({"kl_coefficient": 0.3}, {"loss_type": "dapo", "high": 0.28, "beta": 0.3}),
    "gspo": (
        {"clip_low": 0.05, "clip_high": 0.08},
        {"loss_type": "grpo", "level": "sequence", "low": 0.05, "high": 0.08},
    ),
    "gspo as published": (
        {},
        {"loss_type": "grpo", "level": "sequence", "low": 3e-4, "high": 4e-4},
    ),
    "cispo": ({"clip_high": 0.3}, {"loss_type": "cispo", "high": 1.3}),
    "ppo": ({}, {"loss_type": "bnpo"}),
}


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("case", CASES)
def test_loss_and_gradient_are_those_of_trl(grpo_trainer, case, seed):
    changes, options = CASES[case]
    batch = random_batch(LENGTHS, seed)
    recipe = replace(RECIPES[case.split()[0]], correction="none", **changes)
    theirs, their_gradient, _ = loss_of_trl(grpo_trainer, batch, **options)
    ours, our_gradient, _ = loss_of_ours(recipe, batch)
    assert theirs.abs() > 1e-4
    torch.testing.assert_close(ours, theirs)
    torch.testing.assert_close(our_gradient, their_gradient)


def test_the_shares_of_clipped_tokens_are_those_of_trl(grpo_trainer):
    batch = random_batch(LENGTHS, seed=1)
    _, _, theirs = loss_of_trl(grpo_trainer, batch, "dapo", high=0.28)
    _, _, ours = loss_of_ours(RECIPES["dapo"], batch)
    assert ours["clip_low"] == pytest.approx(theirs["clip_ratio/low_mean"][0])
    assert ours["clip_high"] == pytest.approx(theirs["clip_ratio/high_mean"][0])
    assert min(ours["clip_low"], ours["clip_high"]) > 0


def test_the_kl_to_the_reference_is_that_of_trl(grpo_trainer):
    batch = random_batch(LENGTHS)
    _, _, theirs = loss_of_trl(grpo_trainer, batch, "grpo", beta=0.04)
    _, _, ours = loss_of_ours(RECIPES["grpo"], batch)
    assert ours["reference_kl"] == pytest.approx(theirs["kl"][0])


# TRL computes these ratios inside its generation step, so they are written out here by sequence.
def clipped_by_token(log_ratio):
    return log_ratio.exp().clamp(max=1.1)


def clipped_by_sequence(log_ratio):
    return torch.cat(
        [x.sum().exp().clamp(max=1.1).expand(len(x)) for x in log_ratio.split(LENGTHS)]
    )


def masked_by_token(log_ratio):
    ratio = log_ratio.exp()
    return ratio.masked_fill((ratio < 0.8) | (ratio > 1.2), 0.0)


def masked_by_sequence(log_ratio):
    ratios = [x.sum().exp() for x in log_ratio.split(LENGTHS)]
    kept = [r if r <= 1.3 else torch.tensor(0.0) for r in ratios]
    return torch.cat([r.expand(n) for r, n in zip(kept, LENGTHS, strict=True)])


@pytest.mark.parametrize(
    ("correction", "bounds", "ratio_of"),
    [
        ("token_tis", (0.0, 1.1), clipped_by_token),
        ("sequence_tis", (0.0, 1.1), clipped_by_sequence),
        ("icepop", (0.8, 1.2), masked_by_token),
        ("sequence_mask", (0.0, 1.3), masked_by_sequence),
    ],
)
@pytest.mark.parametrize("name", ["grpo", "dapo", "cispo"])
def test_corrected_losses_are_those_of_trl(grpo_trainer, name, correction, bounds, ratio_of):
    """The KL term is left uncorrected by both."""
    batch = random_batch(LENGTHS)
    changes = {"correction": correction, "correction_bounds": bounds, "kl_coefficient": 0.1}
    recipe = replace(RECIPES[name], clip_high=0.28, **changes)
    ratio = ratio_of(batch.old_logprobs - batch.inference_logprobs)
    assert len(ratio.unique()) > 2
    high = 1.28 if name == "cispo" else 0.28
    theirs, their_gradient, _ = loss_of_trl(
        grpo_trainer, batch, name, high=high, beta=0.1, ratio=ratio
    )
    ours, our_gradient, metrics = loss_of_ours(recipe, batch)
    torch.testing.assert_close(ours, theirs)
    torch.testing.assert_close(our_gradient, their_gradient)
    assert metrics["correction"] == pytest.approx(float(ratio.mean()))
    assert metrics["masked"] == pytest.approx(float((ratio == 0).float().mean()))
