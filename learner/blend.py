"""Weights between the live version's and those in training.

A drafter that has learned new traffic has often unlearned some of the old. On the straight line
between the two sets of weights much of the gain is kept and less of the loss (Wortsman et al., Robust
fine-tuning of zero-shot models, CVPR 2022).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from learner.drafters.base import Drafter

HEAD = "lm_head.weight"
"""Its rows belong to the draft vocabulary."""


@contextmanager
def blended(drafter: Drafter, other: Drafter, share: float) -> Iterator[None]:
    """Within, ``drafter`` has ``other + share * (drafter - other)`` for weights; then its own again.

    Rows of the head for tokens that ``other`` cannot draft stay the drafter's own.
    """
    given: dict[str, Tensor] = dict(other.named_parameters())
    own = {name: p.detach().clone() for name, p in drafter.named_parameters()}
    try:
        with torch.no_grad():
            for name, parameter in drafter.named_parameters():
                theirs = given[name]
                if name == HEAD:
                    theirs = _rows_for(drafter.vocab, other.vocab, theirs, parameter)
                parameter.lerp_(theirs.to(parameter.dtype), 1 - share)
        yield
    finally:
        with torch.no_grad():
            for name, parameter in drafter.named_parameters():
                parameter.copy_(own[name])


def _rows_for(vocab: Tensor, known: Tensor, rows: Tensor, missing: Tensor) -> Tensor:
    """``rows`` of the vocabulary ``known``, in the order of ``vocab``; where there is none, ``missing``."""
    place = torch.searchsorted(known, vocab).clamp(max=len(known) - 1)
    found = (known[place] == vocab).unsqueeze(1)
    return torch.where(found, rows[place], missing)
