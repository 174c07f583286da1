"""What LoRA adapters add to a layer on a CPU. Read against vLLM 0.32.0 (``lora.ops.torch_ops``).

vLLM takes each token's matrices by the number of its adapter, which is -1 for a token without one, and
so takes the last adapter's: a request of the model itself that shares a step with one of an adapter
gets that adapter's answer (upstream pull request 48421). It also copies the matrices for every token.
Here each run of tokens with one adapter is multiplied by that adapter's matrices, and the others are
left alone.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU

from rlcore.engine.fixes import EngineUnsafe


def add_lora_linear(
    self: Any,
    y: Tensor,
    x: Tensor,
    lora_a_stacked: tuple[Tensor, ...],
    lora_b_stacked: tuple[Tensor, ...],
    scale: float,
    output_slices: tuple[int, ...],
    **_: Any,
) -> None:
    """Adds x A^T B^T times ``scale`` to ``y``, by each token's adapter, where it has one.

    ``x`` [..., inputs], ``y`` [..., outputs]; of each of the layers fused into one, A [slots, 1, rank,
    inputs], B [slots, 1, its outputs, rank] and the number of its outputs.
    """
    if self.no_lora:
        return
    rows, out = x.view(-1, x.shape[-1]), y.view(-1, y.shape[-1])
    slots = self._lora_indices_per_batch[: self.batch_size].tolist()
    lengths = self._seq_lengths[: self.batch_size].tolist()
    start = 0
    for slot, length in zip(slots, lengths, strict=True):
        tokens = slice(start, start + length)
        start += length
        if slot < 0:
            continue
        offset = 0
        for a, b, width in zip(lora_a_stacked, lora_b_stacked, output_slices, strict=True):
            added = (rows[tokens] @ a[slot, 0].T) @ b[slot, 0].T
            out[tokens, offset : offset + width].add_(added, alpha=scale)
            offset += width


def apply() -> None:
    """Idempotent. Raises EngineUnsafe when a layer would still compute something else."""
    PunicaWrapperCPU.add_lora_linear = add_lora_linear
    verify()


def verify() -> None:
    """Two adapters, and a token with none, against values known by hand; raises EngineUnsafe."""
    from vllm.lora.layers import LoRAMapping

    wrapper = PunicaWrapperCPU(8, 8, "cpu")
    numbers = (5, 5, 0, 3)
    wrapper.update_metadata(LoRAMapping(numbers, numbers, is_prefill=True), [3, 5], 3, 16)
    a, b = torch.zeros(2, 1, 2, 2), torch.zeros(2, 1, 2, 2)
    for slot, factor in enumerate((1.0, 10.0)):
        a[slot, 0, 0] = factor  # the sum of the inputs, times the factor
        b[slot, 0, 1, 0] = 1.0  # to the second output
    x = torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0], [7.0, 8.0]])
    y = torch.zeros(4, 2)
    wrapper.add_lora_linear(y, x, (a,), (b,), 1.0, (2,))
    if y.tolist() != [[0.0, 30.0], [0.0, 70.0], [0.0, 0.0], [0.0, 15.0]]:
        raise EngineUnsafe(
            f"vLLM computes something else for LoRA adapters on a CPU ({y.tolist()}). Use the vLLM version "
            "pinned in requirements/."
        )
