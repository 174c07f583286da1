"""What DAPO (Yu et al. 2025) does to rewards before advantages are computed."""

from __future__ import annotations

from torch import Tensor

from rlcore.algorithms.segments import BatchError


def overlong_penalty(lengths: Tensor, max_tokens: int, buffer: int) -> Tensor:
    """To be added to the rewards: 0 up to ``max_tokens`` - ``buffer``, from there linearly to -1.

    ``lengths`` [n]: tokens sampled for each rollout; ``max_tokens``: the most it may sample. Returns
    [n] float32. Raises BatchError unless 0 < buffer <= max_tokens.
    """
    if not 0 < buffer <= max_tokens:
        raise BatchError(
            f"the overlong buffer is {buffer} tokens; it must be at least 1 and at most the "
            f"{max_tokens} that a rollout may sample"
        )
    return ((max_tokens - buffer - lengths).float() / buffer).clamp(-1.0, 0.0)
