import pytest
import torch
from torch import nn

from rlcore.optim import MuonAdamW

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
