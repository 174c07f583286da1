"""Reads a model's weights back out of the engine. Read against vLLM 0.32.0.

On CPU vLLM prepacks linear weights and empties ``layer.weight``, so a weight cannot simply be looked
at: a linear layer is read back by what it computes on a fixed probe, everything else by its values. What
is to be found is computed beforehand (``expect``), so that the engine stands still only for the reading.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from vllm.config import VllmConfig
from vllm.model_executor.layers.vocab_parallel_embedding import (
    ParallelLMHead,
    VocabParallelEmbedding,
)

from rlcore.weights import WeightError

FUSED = {
    "q_proj": ("qkv_proj", 0),
    "k_proj": ("qkv_proj", 1),
    "v_proj": ("qkv_proj", 2),
    "gate_proj": ("gate_up_proj", 0),
    "up_proj": ("gate_up_proj", 1),
}
"""Checkpoint name of a linear layer -> the fused layer vLLM keeps it in, and its place there."""

NOT_KEPT = frozenset({"t2d"})
"""Tensors of an EAGLE-3 checkpoint that vLLM does not load."""

TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 3e-2, torch.float16: 1e-2}
"""Largest difference of a probe's result, relative to its largest value."""


@dataclass(frozen=True)
class _Probe:
    """A fixed input of a layer and its result. An embedding's inputs are ids [n], a linear layer's
    rows [2, in]."""

    inputs: torch.Tensor
    result: torch.Tensor
    """[n, out] float32"""
    dtype: torch.dtype


@dataclass(frozen=True)
class Expected:
    """What the engine must hold and compute; empty with tensor parallelism, where layers are shards."""

    values: dict[tuple[str, str], torch.Tensor] = field(default_factory=dict)
    """By (module, attribute)."""
    probes: dict[str, _Probe] = field(default_factory=dict)
    """By module."""


def expect(model: nn.Module, tensors: Mapping[str, torch.Tensor], config: VllmConfig) -> Expected:
    """What the engine holds once ``model`` has loaded this checkpoint.

    Raises WeightError for a tensor the engine has no place for.
    """
    modules: dict[str, Any] = dict(model.named_modules())
    parts: defaultdict[tuple[str, str], dict[int, torch.Tensor]] = defaultdict(dict)
    for name, tensor in tensors.items():
        if name in NOT_KEPT:
            continue
        full, place = engine_name(name, modules)
        path, _, attribute = full.rpartition(".")
        parts[path, attribute][place] = tensor
    expected = Expected()
    if config.parallel_config.tensor_parallel_size > 1:
        return expected
    for (path, attribute), by_place in parts.items():
        whole = [by_place[place] for place in sorted(by_place)]
        tensor = whole[0] if len(whole) == 1 else torch.cat(whole)
        if tensor.dim() == 1:
            expected.values[path, attribute] = tensor
        elif attribute == "weight":
            expected.probes[path] = _probe(modules[path], tensor)
    return expected


def read_back(model: nn.Module, expected: Expected) -> None:
    """Raises WeightError when the engine does not hold exactly these weights."""
    modules: dict[str, Any] = dict(model.named_modules())
    for (path, attribute), want in expected.values.items():
        got = getattr(modules[path], attribute).data
        want = want.to(got.device, got.dtype)
        if got.shape != want.shape or not torch.equal(got, want):
            name = f"{path}.{attribute}".lstrip(".")
            raise WeightError("read_back", f"the engine holds another {name}")
    for path, probe in expected.probes.items():
        _check_probe(path, modules[path], probe)


def engine_name(name: str, modules: Mapping[str, Any]) -> tuple[str, int]:
    """Where vLLM keeps a checkpoint tensor, and its place within a fused layer.

    Raises WeightError for a tensor the engine has no place for.
    """
    if name == "d2t":
        return "draft_id_to_target_id", 0
    name = name.replace("midlayer.", "layers.0.")
    parts, place = name.split("."), 0
    if len(parts) >= 2:
        parts[-2], place = FUSED.get(parts[-2], (parts[-2], 0))
    name = ".".join(parts)
    for candidate in (name, f"model.{name}"):
        if candidate.rpartition(".")[0] in modules:
            return candidate, place
    raise WeightError("read_back", f"the engine has no place for {name}")


def _is_embedding(module: Any) -> bool:
    return isinstance(module, VocabParallelEmbedding) and not isinstance(module, ParallelLMHead)


def _probe(module: Any, weight: torch.Tensor) -> _Probe:
    if _is_embedding(module):
        ids = torch.arange(0, weight.shape[0], max(1, weight.shape[0] // 8))
        return _Probe(ids, weight[ids].float(), weight.dtype)
    dtype = module.params_dtype if hasattr(module, "params_dtype") else weight.dtype
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(2, weight.shape[1], generator=generator).to(dtype)
    return _Probe(inputs, inputs.float() @ weight.to(dtype).float().T, dtype)


def _check_probe(path: str, module: Any, probe: _Probe) -> None:
    inputs, want = probe.inputs.to(module.weight.device), probe.result
    if _is_embedding(module):
        got = module(inputs).float().cpu()
    else:
        got = module.quant_method.apply(module, inputs, None).float().cpu()[:, : want.shape[1]]
    if (got - want).abs().max() > TOLERANCE[probe.dtype] * want.abs().max().clamp(min=1e-6):
        raise WeightError("read_back", f"the engine computes something else with {path}")
