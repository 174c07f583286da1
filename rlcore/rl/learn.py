"""The trainer's side of a run: batches of finished groups in, a better policy out."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rlcore.algorithms.advantages import ADVANTAGES
from rlcore.algorithms.recipes import Recipe
from rlcore.asynchrony.token_ledger import Fate
from rlcore.optim import MuonAdamW
from rlcore.policy.lora import Lora, adapter_config, adapter_weights, merged_weights
from rlcore.policy.model import config_of, load_policy, weights
from rlcore.policy.objective import PolicyObjective
from rlcore.policy.packing import PolicyBatch, WeightedRollout, pack
from rlcore.rl.settings import RLTrainSettings
from rlcore.rollout import Rollout
from rlcore.trainer import Schedule, Trainer, UpdateMetrics


@dataclass(frozen=True)
class BatchReport:
    """What became of one batch."""

    updates: list[UpdateMetrics]
    tokens: list[int]
    """Sampled tokens of each of them."""
    computed: int
    """Tokens that a pass computed, shared prompts once."""
    before: list[int | None]
    """For each group, the optimizer updates that were taken on the batch before the one it was in; None
    where that one was not taken."""

    @property
    def taken(self) -> int:
        """Optimizer updates."""
        return sum(update.skipped is None for update in self.updates)

    def fates(self) -> dict[Fate, int]:
        """What became of the sampled tokens; they add up to all of them."""
        fates: Counter[Fate] = Counter()
        for update, tokens in zip(self.updates, self.tokens, strict=True):
            if update.skipped is not None:
                fates[Fate.SKIPPED] += tokens
                continue
            # Means over all tokens: times their number they are counts again.
            trained = round(update.metrics["effective"] * tokens)
            none = round(update.metrics["no_advantage"] * tokens)
            fates[Fate.TRAINED] += trained
            fates[Fate.ZERO_ADVANTAGE] += none
            fates[Fate.MASKED] += tokens - trained - none
        return dict(fates)

    def metrics(self) -> dict[str, float]:
        """Means over the updates that were taken."""
        taken = [update for update in self.updates if update.skipped is None]
        if not taken:
            return {}
        names = {name for update in taken for name in update.metrics}
        means = {
            name: statistics.fmean(u.metrics[name] for u in taken if name in u.metrics)
            for name in names
        }
        return means | {
            "loss": sum(u.loss for u in taken) / len(taken),
            "grad_norm": sum(u.grad_norm for u in taken) / len(taken),
            "lr_factor": taken[-1].lr_factor,
        }


class PolicyLearner:
    """The policy in training. Its calls block: run them in a thread."""

    def __init__(self, settings: RLTrainSettings, folder: Path, threads: int) -> None:
        """``threads``: that it computes with on a CPU."""
        options = settings.optimiser
        self.recipe: Recipe = settings.chosen_recipe()
        self.device = torch.device(_device(options.device))
        self.micro_batch_tokens = options.micro_batch_tokens
        self.threads = threads
        """For the balance controller to set, both of them; a batch keeps what it began with."""
        self._updates_per_batch = options.updates_per_batch
        fast = options.precision == "bfloat16"
        self._base = folder
        self.lora: Lora | None = settings.lora.chosen()
        """What of the policy is trained; None for all of it."""
        self.policy: Any = load_policy(
            folder, self.device, fast=fast, lora=self.lora, seed=settings.seed
        )
        reference = None
        if self.recipe.needs_reference:
            reference = load_policy(folder, self.device, fast=fast).requires_grad_(False)
        self._objective = PolicyObjective(
            self.recipe,
            settings.sampling.max_tokens,
            reference,
            fast=fast,
        )
        self.trainer: Trainer[Any, PolicyBatch] = Trainer(
            self.policy,
            self._objective,
            MuonAdamW(
                [(n, p) for n, p in self.policy.named_parameters() if p.requires_grad],
                adamw_only=True,
                adamw_lr=options.lr,
                weight_decay=options.weight_decay,
                betas=(0.9, 0.999),
            ),
            Schedule(warmup=options.warmup),
            max_grad_norm=options.max_grad_norm,
            seed=settings.seed,
        )

    def train(self, groups: Sequence[Sequence[Rollout]], version: int) -> BatchReport:
        """One batch: ``updates_per_batch`` optimizer updates, each on its share of the groups.

        ``version``: of the policy as it is now.
        """
        torch.set_num_threads(self.threads)  # OpenMP's number is of the thread that computes
        weighted = self._weighted(groups)
        shares = [
            [w for group in weighted[i :: self._updates_per_batch] for w in group]
            for i in range(self._updates_per_batch)
        ]
        packed = [pack(share, self.micro_batch_tokens, version) for share in shares if share]
        packed = [[_to(batch, self.device) for batch in batches] for batches in packed]
        if len(packed) > 1:
            add_old = self._objective.with_old_logprobs
            packed = [[add_old(self.policy, b) for b in batches] for batches in packed]
        updates = [self.trainer.update(batches) for batches in packed]
        return BatchReport(
            updates=updates,
            tokens=[sum(len(batch.labels) for batch in batches) for batches in packed],
            computed=sum(batch.tokens for batches in packed for batch in batches),
            before=_before(updates, len(groups), self._updates_per_batch),
        )

    def _weighted(self, groups: Sequence[Sequence[Rollout]]) -> list[list[WeightedRollout]]:
        """Advantages are taken over the whole batch: some recipes normalise by all of it."""
        rewards = torch.tensor([r.reward for group in groups for r in group], dtype=torch.float32)
        index = torch.tensor([g for g, group in enumerate(groups) for _ in group])
        advantages = iter(ADVANTAGES[self.recipe.advantage](rewards, index).tolist())
        sequence = iter(range(len(rewards)))
        return [
            [WeightedRollout(rollout, next(advantages), next(sequence)) for rollout in group]
            for group in groups
        ]

    def snapshot(self) -> dict[str, Tensor]:
        """A copy, on the CPU, of what a version is made of: the policy's weights, or its adapter's."""
        made_of = weights(self.policy) if self.lora is None else adapter_weights(self.policy)
        return {name: tensor.to("cpu", copy=True) for name, tensor in made_of.items()}

    def config(self) -> dict[str, Any]:
        """What belongs beside those weights."""
        if self.lora is not None:
            return adapter_config(self.policy, self.lora, self._base)
        return self.whole_config()

    def whole(self) -> dict[str, Tensor]:
        """The whole policy's weights, with what an adapter adds to them."""
        return weights(self.policy) if self.lora is None else merged_weights(self.policy)

    def whole_config(self) -> dict[str, Any]:
        return config_of(self.policy)

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        return self.trainer.state()

    def load_state(self, tensors: Mapping[str, Tensor], counters: Mapping[str, Any]) -> None:
        self.trainer.load_state(tensors, counters)


def _before(
    updates: Sequence[UpdateMetrics], groups: int, updates_per_batch: int
) -> list[int | None]:
    """``updates`` are fewer than ``updates_per_batch`` where there are fewer groups."""
    taken = [update.skipped is None for update in updates]
    counts = [sum(taken[:i]) if took else None for i, took in enumerate(taken)]
    return [counts[i % updates_per_batch] for i in range(groups)]


def _device(name: str) -> str:
    if name != "auto":
        return name
    return "cuda" if torch.cuda.is_available() else "cpu"


def _to(batch: PolicyBatch, device: torch.device) -> PolicyBatch:
    if device.type == "cpu":
        return batch
    moved = {
        name: value.to(device) for name, value in vars(batch).items() if isinstance(value, Tensor)
    }
    return PolicyBatch(**{**vars(batch), **moved})
