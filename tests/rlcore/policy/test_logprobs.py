"""Chosen log-probabilities and their gradients are those of plain log-softmax."""

from __future__ import annotations

import pytest
import torch

from rlcore.policy import logprobs
from rlcore.policy.logprobs import CHUNK, chosen_logprobs

SIZES = [1, 7, CHUNK, 2 * CHUNK + 3]


def inputs(size: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(size)
    rows = torch.randn(size, 16, generator=generator)
    weight = torch.randn(50, 16, generator=generator)
    labels = torch.randint(50, (size,), generator=generator)
    temperatures = 0.5 + torch.rand(size, generator=generator)
    return [rows.requires_grad_(), weight.requires_grad_(), labels, temperatures]


def plain(rows, weight, labels, temperatures):
    table = torch.log_softmax(rows @ weight.T / temperatures[:, None], -1)
    entropy = -(table.exp() * table).sum(-1)
    return table.gather(1, labels[:, None]).squeeze(1), entropy.detach()


def gradients(function, size: int, **options):
    given = inputs(size)
    chosen, _ = function(*given, **options)
    (chosen * torch.linspace(-1, 2, size)).sum().backward()
    return given[0].grad, given[1].grad


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("fast", [False, True])
def test_values_are_those_of_plain_log_softmax(size, fast):
    for got, want in zip(
        chosen_logprobs(*inputs(size), fast=fast), plain(*inputs(size)), strict=True
    ):
        assert torch.allclose(got, want, atol=1e-5)


@pytest.mark.parametrize("size", SIZES)
def test_gradients_are_those_of_plain_log_softmax(size):
    for got, want in zip(
        gradients(chosen_logprobs, size, fast=False), gradients(plain, size), strict=True
    ):
        assert torch.allclose(got, want, atol=1e-4 * want.abs().max())


@pytest.mark.parametrize("most_kept", [0, 2**28])
def test_fast_gradients_err_by_bfloat16_rounding_only(monkeypatch, most_kept):
    monkeypatch.setattr(logprobs, "MOST_KEPT", most_kept)
    size = 2 * CHUNK + 3
    for got, want in zip(
        gradients(chosen_logprobs, size, fast=True), gradients(plain, size), strict=True
    ):
        assert (got - want).norm() < 0.01 * want.norm()
