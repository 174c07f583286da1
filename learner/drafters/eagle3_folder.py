"""Reads EAGLE-3 heads from disk: our own, vLLM's layout from elsewhere, and ``speculators``'."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from learner.drafters.base import read_folder
from learner.target import Target

DEFAULT_AUX_COUNT = 3
"""vLLM captures so many layers where a config names none."""


def read_head(
    folder: str | Path, target: Target
) -> tuple[dict[str, Tensor], dict[str, Any], Tensor]:
    """(tensors by exported name, config, vocabulary [V_draft]) of a head for ``target``.

    Raises ValueError on a head that cannot be trained here: other widths than the target's, biases,
    extra norms, an embedding other than the target's, layers read that the target does not have.
    """
    stored, config = read_folder(folder)
    config = _flat_config(config)
    for key in ("fc_norm", "norm_before_fc", "norm_output", "attention_bias"):
        if config.get(key) or (config.get("eagle_config") or {}).get(key):
            raise ValueError(f"{folder}: heads with {key} cannot be trained here")
    if config["hidden_size"] != target.hidden_size:
        raise ValueError(f"{folder}: hidden size {config['hidden_size']} is not the target's")
    # vLLM leaves a whole batch without drafts when one request is longer than the head says it can be;
    # positions are rotary, so a head can be as long as its target.
    config["max_position_embeddings"] = max(
        config["max_position_embeddings"], target.config["max_position_embeddings"]
    )
    tensors = {
        name.removeprefix("model.").replace("layers.0.", "midlayer."): tensor
        for name, tensor in stored.items()
    }
    tensors.pop("t2d", None)
    if "fc.weight" not in tensors:
        raise ValueError(f"{folder}: no fc, so no EAGLE-3 head")
    _check_aux(folder, config, tensors["fc.weight"].shape[1], target)
    embedding = tensors.pop("embed_tokens.weight", None)
    if embedding is not None and not _same(embedding, target.embedding):
        raise ValueError(f"{folder}: its embedding is not the target's")
    offsets = tensors.pop("d2t", None)
    if offsets is None:
        vocab = torch.arange(target.vocab_size)
    else:
        vocab = offsets.long() + torch.arange(len(offsets))
    config["draft_vocab_size"] = len(vocab)
    config["vocab_size"] = target.vocab_size
    # A head without an lm_head of its own uses the target's; it is trained as a copy.
    tensors.setdefault("lm_head.weight", target.lm_head[vocab])
    return {name: tensor.float() for name, tensor in tensors.items()}, config, vocab


def aux_count(config: dict[str, Any]) -> int:
    """How many auxiliary layers a head of this config reads."""
    return len(_aux_layers(config)) or DEFAULT_AUX_COUNT


def _aux_layers(config: dict[str, Any]) -> list[int]:
    """The auxiliary layers that a config names; none leaves vLLM's default."""
    eagle_config = config.get("eagle_config") or {}
    key = "eagle_aux_hidden_state_layer_ids"
    return config.get(key) or eagle_config.get(key) or []


def _check_aux(folder: str | Path, config: dict[str, Any], width: int, target: Target) -> None:
    """The engine has to give the head the states that its ``fc``, ``width`` wide, reads."""
    if (config.get("eagle_config") or {}).get("use_aux_hidden_state") is False:
        raise ValueError(f"{folder}: heads without auxiliary states cannot be trained here")
    named, count = _aux_layers(config), aux_count(config)
    if len(set(named)) < len(named) or not all(0 <= layer <= target.layers for layer in named):
        raise ValueError(f"{folder}: reads layers {named} of a target that has {target.layers}")
    if width != count * target.hidden_size:
        raise ValueError(
            f"{folder}: its config has it read {count} auxiliary layers, its fc is made for "
            f"{width / target.hidden_size:g}"
        )


def _same(one: Tensor, other: Tensor) -> bool:
    # The two may have been rounded to different dtypes.
    return one.shape == other.shape and torch.allclose(one.float(), other, rtol=1e-2, atol=1e-3)


def _flat_config(config: dict[str, Any]) -> dict[str, Any]:
    """The config of a ``speculators`` head in the plain layout; any other as it is."""
    if "transformer_layer_config" not in config:
        return config
    inner: dict[str, Any] = config["transformer_layer_config"]
    flat = inner | {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "num_hidden_layers": 1,
        "tie_word_embeddings": False,
    }
    # Absent means true in that library, and false in vLLM's plain layout.
    flat["norm_before_residual"] = config.get("norm_before_residual", True)
    for key in ("eagle_aux_hidden_state_layer_ids", "fc_norm", "norm_before_fc", "norm_output"):
        if config.get(key):
            flat[key] = config[key]
    return flat
