"""Products in bfloat16 that see every float32 update of the weights."""

from __future__ import annotations

import torch
from torch import nn

from rlcore.policy.split_linear import split_linears


def a_layer() -> tuple[nn.Linear, nn.Linear, torch.Tensor]:
    """(plain, split, inputs); the weights are bfloat16 numbers, as those of published models."""
    torch.manual_seed(0)
    plain = nn.Linear(256, 128, bias=True)
    plain.weight.data = plain.weight.data.to(torch.bfloat16).float()
    split = nn.Sequential(nn.Linear(256, 128, bias=True))
    split[0].load_state_dict(plain.state_dict())
    split_linears(split)
    return plain, split[0], torch.randn(3, 50, 256)


def test_an_update_below_a_bfloat16_step_is_seen():
    plain, split, _ = a_layer()
    signs = torch.randn_like(plain.weight).sign()
    step = 2e-5 * signs
    before = plain.weight.data.clone()
    aligned = signs + 0.5  # row r moves output r, by less than a bfloat16 step of it

    def mean_output(outputs: torch.Tensor) -> float:
        return float(outputs.detach().float().diagonal().mean())

    start = mean_output(split(aligned))
    split.weight.data += step
    rounded = (before + step).to(torch.bfloat16).float()
    assert ((rounded == before).float().mean()) > 0.8  # what a rounded weight would see
    want = float((step * aligned).sum(1).mean())
    assert abs(mean_output(split(aligned)) - start - want) < 0.1 * want


def test_gradients_are_those_of_a_plain_layer_up_to_rounding():
    plain, split, inputs = a_layer()
    grads = []
    for layer in (plain, split):
        given = inputs.clone().requires_grad_()
        layer(given).float().square().sum().backward()
        grads.append((given.grad, layer.weight.grad, layer.bias.grad))
    for want, got in zip(*grads, strict=True):
        assert got.dtype == torch.float32
        assert (got - want).norm() < 0.01 * want.norm()


def test_subclasses_of_linear_stay_what_they_are():
    class Special(nn.Linear):
        pass

    holder = nn.Sequential(Special(2, 2))
    split_linears(holder)
    assert type(holder[0]) is Special
