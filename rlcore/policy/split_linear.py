"""Linear layers in bfloat16 products that lose no update of their float32 weights.

A policy's update is mostly smaller than half a bfloat16 step of the weight that it moves: rounded to
bfloat16, the weight is where it was, and the trainer would go on computing the old policy. So the weight
is multiplied as the sum of two bfloat16 matrices, the rounded one and the rest of it. That is four
products instead of three for forward and backward pass together, each several times as fast as one in
float32. The inputs are rounded once; their gradient, which bears rounding, needs the first part only.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


class _SplitProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, inputs: Tensor, weight: Tensor) -> Tensor:
        rows = inputs.to(torch.bfloat16)
        coarse = weight.to(torch.bfloat16)
        rest = (weight - coarse).to(torch.bfloat16)
        ctx.save_for_backward(rows, coarse)
        ctx.dtype = inputs.dtype
        # One product, summed in float32: the second part's outputs are too small to be added to a
        # rounded first part's.
        return nn.functional.linear(torch.cat([rows, rows], -1), torch.cat([coarse, rest], 1))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        rows, coarse = ctx.saved_tensors
        gradient = gradient.to(torch.bfloat16)
        by_weight = None
        if ctx.needs_input_grad[1]:  # not of a layer that only bears an adapter
            by_weight = (gradient.flatten(0, -2).T @ rows.flatten(0, -2)).float()
        return (gradient @ coarse).to(ctx.dtype), by_weight


class SplitLinear(nn.Linear):
    """``nn.Linear`` with float32 weights and bfloat16 products and outputs."""

    def forward(self, inputs: Tensor) -> Tensor:
        outputs = _SplitProduct.apply(inputs, self.weight)
        return outputs if self.bias is None else outputs + self.bias.to(outputs.dtype)


def split_linears(module: nn.Module) -> None:
    """Make every plain linear layer in ``module`` a SplitLinear, its parameters as they are."""
    for layer in module.modules():
        if type(layer) is nn.Linear:
            layer.__class__ = SplitLinear
