"""LoRA: of a policy only low-rank factors beside its linear layers are trained (Hu et al., 2021).

The layers are peft's, put into the model in place, so that the model is called as without them. The
output layer and the embedding are left alone: the drafter shares them, and the engine takes no adapters
of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor, nn

from rlcore.errors import PacelineError
from rlcore.weights import ADAPTER_CONFIG

PREFIX = "base_model.model."
"""Of every name in an adapter as peft saves it."""

_NAME = "default"
"""Of the adapter among a layer's own, as peft calls the only one."""


class LoraError(PacelineError):
    """An adapter that cannot be trained."""


@dataclass(frozen=True)
class Lora:
    rank: int
    alpha: float
    """What the factors add is scaled by alpha / rank."""
    targets: Sequence[str]
    """Last part of the names of the linear layers that are adapted; empty for all in the decoder."""


def adapt(model: Any, lora: Lora, seed: int) -> None:
    """Put factors beside the decoder's linear layers and freeze everything else, in place.

    At first they add nothing. ``seed``: of the random ones. Raises LoraError.
    """
    from peft import inject_adapter_in_model

    layers = linear_layers(model.model)
    if unknown := sorted(set(lora.targets) - layers):
        raise LoraError(
            f"lora.targets: the policy has no linear layers {', '.join(unknown)}; it has "
            f"{', '.join(sorted(layers))}"
        )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        inject_adapter_in_model(_config(lora, sorted(lora.targets or layers)), model)


def linear_layers(decoder: nn.Module) -> set[str]:
    """The last part of the names of its linear layers."""
    return {
        name.rpartition(".")[2]
        for name, layer in decoder.named_modules()
        if isinstance(layer, nn.Linear)
    }


def adapter_weights(model: nn.Module) -> dict[str, Tensor]:
    """The factors, by the names that peft saves them under."""
    return {
        PREFIX + name.replace(f".{_NAME}.", "."): parameter.detach()
        for name, parameter in model.named_parameters()
        if ".lora_" in name
    }


def adapter_config(model: nn.Module, lora: Lora, base: Path) -> dict[str, Any]:
    """What peft saves beside them as ``adapter_config.json``. ``base``: the folder of the model."""
    adapted = {name.split(".")[-4] for name, _ in model.named_parameters() if ".lora_A." in name}
    config = _config(lora, sorted(adapted)).to_dict()
    return config | {
        "target_modules": sorted(adapted),
        "base_model_name_or_path": str(base),
        "inference_mode": True,
    }


def merged_weights(model: nn.Module) -> dict[str, Tensor]:
    """The whole model's parameters with what the factors add, by their Hugging Face names."""
    from peft.tuners.lora import Linear

    added = {
        f"{name}.base_layer.weight": layer.get_delta_weight(_NAME)
        for name, layer in model.named_modules()
        if isinstance(layer, Linear)
    }
    merged = {}
    for name, parameter in model.named_parameters():
        if ".lora_" not in name:
            weight = parameter.detach()
            merged[name.replace(".base_layer.", ".")] = (
                weight + added[name] if name in added else weight
            )
    return merged


def _config(lora: Lora, targets: list[str]) -> Any:
    from peft import LoraConfig

    return LoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,  # type: ignore[arg-type]  # any number is taken
        target_modules=targets,
        lora_dropout=0.0,
        task_type="CAUSAL_LM",
    )


class AdapterFacts(msgspec.Struct):
    """What is read of an ``adapter_config.json``."""

    r: int
    base_model_name_or_path: str


def adapter_facts(folder: Path) -> AdapterFacts | None:
    """Of a folder with an adapter in it, None for any other. Raises LoraError when they cannot be read."""
    path = folder / ADAPTER_CONFIG
    if not path.is_file():
        return None
    try:
        return msgspec.json.decode(path.read_bytes(), type=AdapterFacts)
    except (OSError, msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise LoraError(f"{path} cannot be read: {error}") from None
