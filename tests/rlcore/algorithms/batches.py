"""Random packed batches for the tests."""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch
from torch import Tensor


@dataclass
class Batch:
    """As ``policy_loss`` takes it; ``logprobs`` is a leaf with gradient."""

    logprobs: Tensor
    old_logprobs: Tensor
    inference_logprobs: Tensor
    ref_logprobs: Tensor
    advantages: Tensor
    sequence: Tensor

    def arguments(self):
        return {f.name: getattr(self, f.name) for f in fields(self)}

    def take(self, where):
        """The part of the batch at ``where``, as a batch with a leaf of its own."""
        parts = {name: value.detach()[where] for name, value in self.arguments().items()}
        return leaf(Batch(**parts))


def leaf(batch):
    batch.logprobs = batch.logprobs.detach().requires_grad_()
    return batch


def random_batch(lengths, seed=0, update=0.6, mismatch=0.2):
    """Rollouts of ``lengths`` tokens. ``update`` and ``mismatch`` scale the log-ratios' deviations
    between current and old, and between old and inference policy."""
    generator = torch.Generator().manual_seed(seed)

    def normal(size, scale):
        return scale * torch.randn(size, generator=generator)

    total = sum(lengths)
    old = -normal(total, 1.0).abs() - 0.1
    sequence = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    batch = Batch(
        logprobs=old + normal(total, update),
        old_logprobs=old,
        inference_logprobs=old + normal(total, mismatch),
        ref_logprobs=old + normal(total, 0.5),
        advantages=normal(len(lengths), 1.0)[sequence],
        sequence=sequence,
    )
    return leaf(batch)
