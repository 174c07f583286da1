import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import rlcore.optim as optim
from rlcore.optim import POLAR_EXPRESS, MuonAdamW, orthogonalise, orthogonalise_blocks

torch.set_num_threads(1)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(7, 4)
        self.hidden = nn.Linear(4, 6)
        self.lm_head = nn.Linear(6, 7, bias=False)

    def forward(self, x):
        return self.lm_head(torch.tanh(self.hidden(self.embed(x))))


def train(net, optimizer, seeds):
    for seed in seeds:
        x = torch.randint(7, (5,), generator=torch.Generator().manual_seed(seed))
        optimizer.zero_grad()
        net(x).logsumexp(-1).sum().backward()
        optimizer.step()


def test_only_hidden_matrices_go_to_muon():
    net = Net()
    optimizer = MuonAdamW(net.named_parameters())
    train(net, optimizer, [0])
    momentum = {name.rpartition(".")[0] for name in optimizer.state_tensors() if "momentum" in name}
    assert momentum == {"hidden.weight"}
    others = {name.rpartition(".")[0] for name in optimizer.state_tensors()} - momentum
    assert others == {"embed.weight", "hidden.bias", "lm_head.weight"}


def test_frozen_parameters_are_left_alone():
    net = Net()
    net.embed.requires_grad_(False)
    before = net.embed.weight.clone()
    optimizer = MuonAdamW(net.named_parameters())
    train(net, optimizer, range(3))
    assert torch.equal(net.embed.weight, before)
    assert not any(name.startswith("embed") for name in optimizer.state_tensors())


def test_state_resumes_bit_for_bit():
    one, two = Net(), Net()
    first = MuonAdamW(one.named_parameters())
    train(one, first, range(3))
    two.load_state_dict(one.state_dict())
    second = MuonAdamW(two.named_parameters())
    second.load_state_tensors(first.state_tensors())
    train(one, first, range(3, 6))
    train(two, second, range(3, 6))
    for a, b in zip(one.parameters(), two.parameters(), strict=True):
        assert torch.equal(a, b)


def test_loaded_state_shares_no_memory_with_its_source():
    net = Net()
    optimizer = MuonAdamW(net.named_parameters())
    train(net, optimizer, [0])
    saved = {name: tensor.clone() for name, tensor in optimizer.state_tensors().items()}
    optimizer.load_state_tensors(saved)
    kept = {name: tensor.clone() for name, tensor in saved.items()}
    train(net, optimizer, [1])
    assert all(torch.equal(saved[name], kept[name]) for name in saved)


def test_state_of_another_model_is_refused():
    with pytest.raises(KeyError, match="other"):
        MuonAdamW(Net().named_parameters()).load_state_tensors({"other.exp_avg": torch.zeros(1)})


def test_scale_zero_changes_nothing():
    net = Net()
    optimizer = MuonAdamW(net.named_parameters())
    before = [p.clone() for p in net.parameters()]
    net(torch.tensor([1])).sum().backward()
    optimizer.step(0.0)
    for a, b in zip(before, net.parameters(), strict=True):
        assert torch.equal(a, b)


def by_its_formula(matrix, steps):
    x = matrix.double() / (1.01 * matrix.double().norm() + 1e-7)
    for a, b, c in POLAR_EXPRESS[:steps]:
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x


def draw(rows, columns, rank, seed):
    generator = torch.Generator().manual_seed(seed)
    left, right = (torch.randn(n, rank, generator=generator) for n in (rows, columns))
    return left @ torch.logspace(0, -2, rank).diag() @ right.T


@settings(max_examples=25, deadline=None)
@given(
    st.integers(1, 40), st.integers(1, 40), st.integers(1, 40), st.integers(1, 5),
    st.integers(0, 2**31),
)  # fmt: skip
def test_orthogonalising_applies_its_polynomials_to_the_singular_values(
    rows, columns, rank, steps, seed
):
    matrix = draw(rows, columns, rank, seed)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(optim, "bfloat16_is_fast", lambda: False)
        got = orthogonalise(matrix, steps).double()
    expected = by_its_formula(matrix, steps)
    torch.testing.assert_close(got, expected, rtol=1e-2, atol=2e-3)


@settings(max_examples=50, deadline=None)
@given(
    st.integers(1, 40), st.integers(1, 40), st.integers(1, 40), st.integers(1, 5),
    st.integers(0, 2**31),
)  # fmt: skip
def test_rounding_never_makes_a_step_longer_than_the_polynomials_can(
    rows, columns, rank, steps, seed
):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(optim, "bfloat16_is_fast", lambda: True)
        got = orthogonalise(draw(rows, columns, rank, seed), steps)
    assert got.dtype == torch.bfloat16
    assert float(torch.linalg.matrix_norm(got.float(), 2)) < 2.2


def test_five_steps_bring_every_singular_value_near_one():
    matrix = torch.randn(30, 60, generator=torch.Generator().manual_seed(0))
    values = torch.linalg.svdvals(orthogonalise(matrix, 5).float())
    assert 0.8 < float(values.min()) <= float(values.max()) < 1.2


def test_a_matrix_of_zeros_stays_one():
    assert torch.equal(orthogonalise(torch.zeros(3, 5), 3).float(), torch.zeros(3, 5))


@pytest.mark.parametrize("shape", [(12, 30), (30, 12)])
def test_blocks_are_pieces_of_the_shorter_side(shape):
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    side = shape.index(12)
    pieces = [orthogonalise(piece, 3) for piece in matrix.split(4, dim=side)]
    assert torch.equal(orthogonalise_blocks(matrix, 3, 4), torch.cat(pieces, dim=side))
    assert torch.equal(orthogonalise_blocks(matrix, 3, None), orthogonalise(matrix, 3))


def test_muon_steps_along_the_orthogonalised_nesterov_momentum():
    generator = torch.Generator().manual_seed(0)
    weight = nn.Parameter(torch.randn(8, 4, generator=generator))
    optimizer = MuonAdamW([("w", weight)], muon_lr=0.1, weight_decay=0.5, momentum=0.9)
    expected, average = weight.detach().clone(), torch.zeros(8, 4)
    for _ in range(3):
        grad = torch.randn(8, 4, generator=generator)
        weight.grad = grad.clone()
        optimizer.step(0.5)
        average = 0.9 * average + 0.1 * grad
        direction = orthogonalise(0.1 * grad + 0.9 * average, 3).float()
        # Twice as many rows as columns: sqrt(2) times the rate.
        expected = expected * (1 - 0.05 * 0.5) - 0.05 * 2**0.5 * direction
    torch.testing.assert_close(weight.detach(), expected, rtol=1e-3, atol=1e-3)


def test_more_orthogonalisation_steps_than_are_known_are_refused():
    with pytest.raises(ValueError, match="1 to 5"):
        MuonAdamW([("w", nn.Parameter(torch.zeros(2, 2)))], orthogonalise_steps=6)
