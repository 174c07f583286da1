"""From losses by token to the loss of a batch: the weight of each token, and the normaliser.

The loss of an update is sum(loss * weight) over sum(normaliser), both summed over all micro-batches
of the update. It does not depend on how the batch was cut, as long as no sequence is cut.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from rlcore.algorithms.segments import segment_count, segment_size

Aggregation = Literal["token_mean", "sequence_mean", "constant_length"]
AGGREGATIONS: tuple[Aggregation, ...] = ("token_mean", "sequence_mean", "constant_length")


def token_weights(
    aggregation: Aggregation, sequence: Tensor, max_tokens: int
) -> tuple[Tensor, float]:
    """Weights [T] float32 and the normaliser of a micro-batch whose tokens are of ``sequence`` [T].

    ``token_mean``: every token weighs the same (DAPO, Yu et al. 2025); normaliser: tokens.
    ``sequence_mean``: the mean over sequences of the mean over their tokens (GRPO, Shao et al. 2024;
    GSPO); normaliser: sequences.
    ``constant_length``: the mean over sequences of the sum over their tokens, divided by the constant
    ``max_tokens``, the most that a rollout may sample (Dr.GRPO, Liu et al. 2025); normaliser:
    sequences.

    A sequence without a sampled token is in no micro-batch and is not counted.
    """
    if aggregation == "token_mean":
        return torch.ones(len(sequence), device=sequence.device), float(len(sequence))
    sequences = float(segment_count(sequence))
    if aggregation == "sequence_mean":
        return (1 / segment_size(sequence)).float(), sequences
    return torch.full((len(sequence),), 1 / max_tokens, device=sequence.device), sequences
