"""Keeps a drafter's vocabulary on the traffic: which target tokens it can draft at all.

Shapes never change; the id map travels with the weights.
"""

from __future__ import annotations

import torch
from torch import Tensor

from learner.batch import Span
from learner.drafters.base import Drafter
from learner.drafters.eagle3 import Eagle3
from learner.target import Target, choose_vocab, prior_counts
from rlcore.optim import MuonAdamW

PROMPT_WEIGHT = 0.2
"""A prompt's token counts this much of a generated one: prompts hint at what will be said."""


STAY_FACTOR = 1.5
"""A token outside must be seen this many times as often as the one it replaces: a token that comes in
starts untrained, so coming and going costs acceptance."""


TRUSTED_COUNT = 10.0
"""Times that each token of a trained drafter's vocabulary counts as seen: it was chosen for a reason, and
its row was trained, which a token that comes in has to make up for."""


class TrafficCounts:
    """How often each target token was seen in traffic that may be trained on."""

    def __init__(self, vocab_size: int) -> None:
        self.counts = torch.zeros(vocab_size, dtype=torch.float64)

    def add(self, span: Span) -> None:
        weights = torch.full(span.token_ids.shape, PROMPT_WEIGHT, dtype=torch.float64)
        weights[span.first_anchor + 1 :] = 1.0
        self.counts.index_add_(0, span.token_ids, weights)

    def trust(self, vocab: Tensor) -> None:
        """``vocab`` is a trained drafter's."""
        self.counts[vocab] += TRUSTED_COUNT


@torch.no_grad()
def follow_traffic(
    drafter: Drafter, target: Target, counts: Tensor, optimizer: MuonAdamW | None
) -> int:
    """Choose the vocabulary anew from ``counts`` [V]; the number of tokens that came in.

    Rows of tokens that stay are kept, with their optimizer state; a token that comes in starts with
    the target's own row.
    """
    wanted = prior_counts(target) + counts
    wanted[drafter.vocab] *= STAY_FACTOR
    vocab = choose_vocab(wanted, len(drafter.vocab))
    fresh = ~torch.isin(vocab, drafter.vocab)
    if not isinstance(drafter, Eagle3) or not fresh.any():
        return 0
    old_place = torch.searchsorted(drafter.vocab, vocab).clamp(max=len(drafter.vocab) - 1)
    rows = drafter.lm_head.weight[old_place]
    rows[fresh] = target.lm_head[vocab[fresh]].to(rows.dtype)
    drafter.lm_head.weight.copy_(rows)
    drafter.vocab = vocab
    if optimizer is not None:
        for name, tensor in optimizer.state_tensors().items():
            if name.startswith("lm_head.weight.") and tensor.ndim == 2:
                moved = tensor[old_place]
                moved[fresh] = 0.0
                tensor.copy_(moved)
    return int(fresh.sum())
