"""The policy as a transformers model, and the log-probabilities of what it sampled."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from rlcore.errors import PacelineError
from rlcore.policy.logprobs import chosen_logprobs
from rlcore.policy.lora import Lora, adapt
from rlcore.policy.packing import PolicyBatch
from rlcore.policy.split_linear import split_linears

LOGITS_AGREE = 1e-3
"""Of the largest logit: far above float32's rounding, far below any scale or cap in use."""


class PolicyError(PacelineError):
    """A policy that cannot be trained."""


def load_policy(
    folder: Path,
    device: torch.device | str = "cpu",
    *,
    fast: bool = False,
    lora: Lora | None = None,
    seed: int = 0,
) -> nn.Module:
    """A causal language model in float32, without dropout.

    ``fast``: with bfloat16 products in its layers, to be used with ``sampled_logprobs(fast=True)``.
    ``lora``: only low-rank factors are to be trained, random ones by ``seed``.
    Raises PolicyError when the folder holds none, LoraError.
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
    if not (hasattr(model, "model") and hasattr(model, "lm_head")):
        raise PolicyError(
            f"{folder}: a {type(model).__name__} is not laid out as a decoder (model) and an output layer "
            "(lm_head), and cannot be trained here"
        )
    if model.get_output_embeddings().bias is not None:
        raise PolicyError(
            f"{folder}: a policy whose output layer has a bias cannot be trained here"
        )
    model.config.use_cache = False
    _check_logits(folder, model)
    if lora is not None:
        adapt(model, lora, seed)
    if fast:
        split_linears(model.model)
    module: nn.Module = model.to(device).eval()  # eval: no dropout, as in inference
    return module


@torch.no_grad()
def _check_logits(folder: Path, model: Any) -> None:
    """Raises PolicyError where logits are more than the output layer's product: scaled, or capped."""
    token_ids = torch.zeros(1, 2, dtype=torch.int64)
    hidden = model.model(input_ids=token_ids).last_hidden_state
    logits = model(input_ids=token_ids).logits
    difference = (hidden @ model.lm_head.weight.T - logits).abs().max()
    if not difference <= LOGITS_AGREE * logits.abs().max():
        raise PolicyError(
            f"{folder}: a {type(model).__name__} changes the logits after its output layer (scales or caps "
            "them), and cannot be trained here"
        )


def weights(module: nn.Module) -> dict[str, Tensor]:
    """The parameters by their Hugging Face names, tied ones once."""
    named = dict(module.named_parameters())
    return {name: parameter.detach() for name, parameter in named.items()}


def config_of(module: Any) -> dict[str, Any]:
    """The configuration as it stands in ``config.json``."""
    config: dict[str, Any] = module.config.to_diff_dict()
    return config | {"use_cache": True, "architectures": [type(module).__name__]}


def sampled_logprobs(
    module: Any, batch: PolicyBatch, *, fast: bool = False
) -> tuple[Tensor, Tensor]:
    """(log-probabilities [S], entropies [S]) of the sampled tokens, both with gradient.

    Both at the temperature that each token was sampled at. ``fast``: attention in bfloat16 as well;
    the weights, the sums between layers and the logits are float32.
    """
    device = batch.token_ids.device.type
    with torch.autocast(device, torch.bfloat16, enabled=fast):
        hidden = module.model(
            input_ids=batch.token_ids,
            position_ids=batch.positions,
            attention_mask=batch.attention_mask(),
        ).last_hidden_state
    rows = hidden.flatten(0, 1)[batch.predicted_at].float()
    return chosen_logprobs(rows, module.lm_head.weight, batch.labels, batch.temperatures, fast=fast)
