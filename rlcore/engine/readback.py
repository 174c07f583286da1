"""Reads a drafter's weights back out of the engine. Read against vLLM 0.32.0.

On CPU vLLM prepacks linear weights and empties ``layer.weight``, so a weight cannot simply be looked
at: a linear layer is read back by what it computes on a fixed probe, everything else by its values.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
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


def read_back(drafter: nn.Module, tensors: Mapping[str, torch.Tensor], config: VllmConfig) -> None:
    """Raises WeightError when the engine does not hold exactly these weights.

    With tensor parallelism a linear layer holds a shard, and only unsharded tensors are compared.
    """
    modules: dict[str, Any] = dict(drafter.named_modules())
    sharded = config.parallel_config.tensor_parallel_size > 1
    linear: defaultdict[str, dict[int, torch.Tensor]] = defaultdict(dict)
    for name, tensor in tensors.items():
        if name in NOT_KEPT:
            continue
        if name == "d2t":
            _same(name, drafter.get_parameter("draft_id_to_target_id").data, tensor)
            continue
        full, place = engine_name(name, modules)
        path, _, attribute = full.rpartition(".")
        module = modules[path]
        if tensor.dim() == 1:
            if not sharded:
                _same(name, getattr(module, attribute).data, tensor)
        elif attribute == "weight":
            linear[path][place] = tensor
    if not sharded:
        for path, parts in linear.items():
            _check_probe(path, modules[path], torch.cat([parts[i] for i in sorted(parts)]))


def engine_name(name: str, modules: Mapping[str, Any]) -> tuple[str, int]:
    """Where vLLM keeps a checkpoint tensor, and its place within a fused layer.

    Raises WeightError for a tensor the engine has no place for.
    """
    name = name.replace("midlayer.", "layers.0.")
    parts, place = name.split("."), 0
    if len(parts) >= 2:
        parts[-2], place = FUSED.get(parts[-2], (parts[-2], 0))
    name = ".".join(parts)
    for candidate in (name, f"model.{name}"):
        if candidate.rpartition(".")[0] in modules:
            return candidate, place
    raise WeightError("read_back", f"the engine's drafter has no place for {name}")


def _same(name: str, got: torch.Tensor, want: torch.Tensor) -> None:
    want = want.to(got.device, got.dtype)
    if got.shape != want.shape or not torch.equal(got, want):
        raise WeightError("read_back", f"the engine holds another {name}")


def _check_probe(path: str, module: Any, weight: torch.Tensor) -> None:
    if isinstance(module, VocabParallelEmbedding) and not isinstance(module, ParallelLMHead):
        ids = torch.arange(0, weight.shape[0], max(1, weight.shape[0] // 8))
        dtype = weight.dtype
        got = module(ids.to(module.weight.device)).float().cpu()
        want = weight[ids].float()
    else:
        dtype = module.params_dtype if hasattr(module, "params_dtype") else weight.dtype
        device = module.weight.device
        generator = torch.Generator().manual_seed(0)
        probe = torch.randn(2, weight.shape[1], generator=generator).to(dtype)
        got = module.quant_method.apply(module, probe.to(device), None).float().cpu()
        want = probe.float() @ weight.to(dtype).float().T
        got = got[:, : want.shape[1]]
    if (got - want).abs().max() > TOLERANCE[dtype] * want.abs().max().clamp(min=1e-6):
        raise WeightError("read_back", f"the engine computes something else with {path}")
