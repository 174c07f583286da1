"""The policy as a transformers model, and the log-probabilities of what it sampled."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from rlcore.errors import PacelineError
from rlcore.policy.packing import PolicyBatch

CHUNK = 512
"""Sampled tokens whose whole logits are in memory at a time: 100 MB for a vocabulary of 50,000."""


class PolicyError(PacelineError):
    """A policy that cannot be trained."""


def load_policy(folder: Path, device: torch.device | str = "cpu") -> nn.Module:
    """A causal language model in float32, in training mode without dropout.

    Raises PolicyError when the folder holds none.
    """
    from transformers import AutoModelForCausalLM

    try:
        model = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="sdpa", local_files_only=True
        )
    except (OSError, ValueError) as error:
        cause = str(error).strip().splitlines()[0]
        raise PolicyError(
            f"{folder} cannot be loaded as a causal language model: {cause}"
        ) from None
    model.config.use_cache = False
    module: nn.Module = model.to(device).eval()  # eval: no dropout, as in inference
    return module


def weights(module: nn.Module) -> dict[str, Tensor]:
    """The parameters and persistent buffers by their Hugging Face names, tied ones once."""
    named = dict(module.named_parameters())
    return {name: parameter.detach() for name, parameter in named.items()}


def config_of(module: Any) -> dict[str, Any]:
    """The configuration as it stands in ``config.json``."""
    config: dict[str, Any] = module.config.to_diff_dict()
    return config | {"architectures": [type(module).__name__]}


def sampled_logprobs(module: Any, batch: PolicyBatch) -> tuple[Tensor, Tensor]:
    """(log-probabilities [S] with gradient, entropies [S] without) of the sampled tokens.

    Both at the temperature that each token was sampled at.
    """
    hidden = module.model(
        input_ids=batch.token_ids,
        position_ids=batch.positions,
        attention_mask=batch.attention_mask(),
    ).last_hidden_state
    rows = hidden.flatten(0, 1)[batch.predicted_at]
    logprobs, entropies = [], []
    for start in range(0, len(rows), CHUNK):
        part = slice(start, start + CHUNK)
        inputs = (module.lm_head, rows[part], batch.labels[part], batch.temperatures[part])
        if torch.is_grad_enabled():
            chosen, entropy = checkpoint(_head, *inputs, use_reentrant=False)
        else:
            chosen, entropy = _head(*inputs)
        logprobs.append(chosen)
        entropies.append(entropy)
    return torch.cat(logprobs), torch.cat(entropies)


def _head(
    lm_head: nn.Module, rows: Tensor, labels: Tensor, temperatures: Tensor
) -> tuple[Tensor, Tensor]:
    logits = lm_head(rows).float() / temperatures[:, None]
    logprobs = torch.log_softmax(logits, dim=-1)
    with torch.no_grad():
        entropy = -(logprobs.exp() * logprobs).sum(-1)
    return logprobs.gather(1, labels[:, None]).squeeze(1), entropy
