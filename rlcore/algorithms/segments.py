"""Sums over the segments of a 1-D tensor: the tokens of a rollout, the rollouts of a group.

``index`` [n] int64 says which segment each entry belongs to. Segments may be scattered, of any size
and numbered with gaps. Results are [n] too: each entry gets what belongs to its segment.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rlcore.errors import PacelineError


class BatchError(PacelineError):
    """Tensors of a batch that do not belong together."""


def check_index(index: Tensor, **values: Tensor) -> None:
    """Raises BatchError unless all ``values`` are 1-D and as long as ``index``, which is int64."""
    if index.dim() != 1 or index.dtype != torch.int64:
        raise BatchError(
            f"the index of a batch is {index.dtype} of shape {list(index.shape)}; "
            "pass one int64 number for each entry"
        )
    for name, value in values.items():
        if value.shape != index.shape:
            raise BatchError(
                f"{name} has shape {list(value.shape)} where the batch has {len(index)} entries; "
                "pass one value for each"
            )


def segment_sum(values: Tensor, index: Tensor) -> Tensor:
    """Sum of each entry's segment, float64 [n], differentiable.

    In float64 because a mean over some 30,000 tokens is compared with a clip range of 3e-4 (GSPO),
    and because the order of additions on a GPU is not fixed.
    """
    unique, place = torch.unique(index, return_inverse=True)
    sums = torch.zeros(len(unique), dtype=torch.float64, device=values.device)
    return sums.index_add(0, place, values.double())[place]


def segment_size(index: Tensor) -> Tensor:
    """Number of entries in each entry's segment, float64 [n]."""
    return segment_sum(torch.ones_like(index), index)


def segment_mean(values: Tensor, index: Tensor) -> Tensor:
    """Mean of each entry's segment, float64 [n], differentiable."""
    return segment_sum(values, index) / segment_size(index)


def segment_constant(values: Tensor, index: Tensor) -> Tensor:
    """True for the entries whose segment holds one value only, bool [n]. Compared exactly."""
    unique, place = torch.unique(index, return_inverse=True)
    empty = values.new_zeros(len(unique))
    least = empty.scatter_reduce(0, place, values, "amin", include_self=False)
    most = empty.scatter_reduce(0, place, values, "amax", include_self=False)
    return (least == most)[place]


def segment_count(index: Tensor) -> int:
    """Number of segments that have an entry."""
    return len(torch.unique(index))
