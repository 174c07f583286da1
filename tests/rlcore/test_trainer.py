import json
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load, save
from torch import nn

from rlcore.optim import MuonAdamW
from rlcore.trainer import LossOutput, Schedule, Trainer

torch.set_num_threads(1)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.hidden = nn.Linear(4, 6)
        self.lm_head = nn.Linear(6, 1)
        self.drop = nn.Dropout(0.5)

    def forward(self, x, drop):
        hidden = torch.tanh(self.hidden(x))
        return self.lm_head(self.drop(hidden) if drop else hidden).squeeze(-1)


def squares(module, x):
    loss = module(x, drop=False).square().sum()
    return LossOutput(loss, float(len(x)), {"square": (float(loss.detach()), float(len(x)))})


def squares_with_dropout(module, x):
    return LossOutput(module(x, drop=True).square().sum(), float(len(x)))


def make(objective=squares, **options):
    net = Net()
    return Trainer(net, objective, MuonAdamW(net.named_parameters()), **options)


def weights(trainer):
    return torch.cat([p.detach().flatten() for p in trainer.module.parameters()])


@pytest.mark.parametrize("cuts", [[10], [3, 7], [1, 8, 1]])
def test_micro_batches_of_any_size_give_the_update_of_the_whole(cuts):
    x = torch.randn(10, 4, generator=torch.Generator().manual_seed(5))
    whole, cut = make(), make()
    a = whole.update([x])
    b = cut.update(x.split(cuts))
    assert a.loss == pytest.approx(b.loss)
    assert a.grad_norm == pytest.approx(b.grad_norm)
    assert b.weight == 10
    assert b.metrics["square"] == pytest.approx(b.loss)
    torch.testing.assert_close(weights(whole), weights(cut))


def test_gradients_are_clipped_to_the_largest_norm():
    seen = []

    class Spy(MuonAdamW):
        def step(self, scale=1.0):
            grads = [p.grad for p in self.parameters.values()]
            seen.append(float(torch.nn.utils.get_total_norm(grads)))

    net = Net()
    x = 100 * torch.ones(3, 4)
    for bound in (1e-3, 1e9):
        metrics = Trainer(net, squares, Spy(net.named_parameters()), max_grad_norm=bound).update(
            [x]
        )
        assert seen[-1] == pytest.approx(min(bound, metrics.grad_norm), rel=1e-3)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_loss_that_is_not_finite_changes_nothing_and_is_counted(bad):
    def objective(module, x):
        return LossOutput(module(x, False).sum() + x.sum(), 1.0)

    trainer = make(objective)
    trainer.update([torch.ones(2, 4)])
    before = weights(trainer)
    metrics = trainer.update([torch.ones(2, 4), torch.full((2, 4), bad), torch.ones(2, 4)])
    assert metrics.skipped == "loss"
    assert trainer.skipped["loss"] == 1
    assert torch.equal(before, weights(trainer))
    assert trainer.update([]).skipped == "empty"


def test_a_gradient_that_is_not_finite_changes_nothing_and_is_counted():
    def root(module, x):
        return LossOutput((module(x, False) * 0.0).sqrt().sum(), 1.0)

    trainer = make(root)
    before = weights(trainer)
    assert trainer.update([torch.ones(2, 4)]).skipped == "gradient"
    assert trainer.updates == 0
    assert trainer.skipped == {"gradient": 1}
    assert torch.equal(before, weights(trainer))
    assert all(p.grad is None for p in trainer.module.parameters())


def test_the_average_weighs_updates_by_their_age():
    trainer = make(average_half_life=2.0)
    expected = weights(trainer)
    for update in range(1, 41):
        trainer.update([torch.ones(2, 4)])
        share = max(1 - 0.5**0.5, 9 / (update + 9))
        expected = (1 - share) * expected + share * weights(trainer)
    with trainer.averaged():
        torch.testing.assert_close(weights(trainer), expected)


def test_showing_the_average_leaves_the_training_as_it_was():
    plain, shown = make(average_half_life=3.0), make(average_half_life=3.0)
    for trainer in (plain, shown):
        for _ in range(5):
            trainer.update([torch.ones(2, 4)])
    before = weights(shown)

    def fail_while_shown():
        with shown.averaged() as module:
            assert module is shown.module
            assert not torch.equal(weights(shown), before)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail_while_shown()
    assert torch.equal(weights(shown), before)
    for trainer in (plain, shown):
        trainer.update([torch.ones(2, 4)])
    assert torch.equal(weights(plain), weights(shown))
    left, right = plain.state()[0], shown.state()[0]
    assert all(torch.equal(left[name], right[name]) for name in left)


def test_without_an_average_the_module_shows_itself():
    trainer = make()
    trainer.update([torch.ones(2, 4)])
    before = weights(trainer)
    with trainer.averaged():
        assert torch.equal(weights(trainer), before)
    assert not any(name.startswith("average") for name in trainer.state()[0])


def test_state_without_an_average_starts_one_at_the_parameters():
    trainer = make()
    trainer.update([torch.ones(2, 4)])
    resumed = make(average_half_life=3.0)
    resumed.load_state(*trainer.state())
    with resumed.averaged():
        assert torch.equal(weights(resumed), weights(trainer))


def test_the_scale_multiplies_the_schedule():
    trainer = make(schedule=Schedule(warmup=4))
    trainer.lr_scale = 0.5
    assert trainer.update([torch.ones(2, 4)]).lr_factor == 0.5 * 0.25
    trainer.lr_scale = 0.0
    before = weights(trainer)
    assert trainer.update([torch.ones(2, 4)]).lr_factor == 0.0
    assert torch.equal(weights(trainer), before)


def test_a_resumed_run_is_bit_for_bit_the_uninterrupted_one():
    def draw(trainer):
        return [torch.randn(4, 4, generator=trainer.generator) for _ in range(2)]

    schedule = Schedule(warmup=3, decay=5)
    straight = make(squares_with_dropout, schedule=schedule, average_half_life=3.0, seed=9)
    straight.lr_scale = 1.5
    for _ in range(4):
        straight.update(draw(straight))
    tensors, counters = straight.state()
    tensors, counters = load(save(tensors)), json.loads(json.dumps(counters))
    for _ in range(4):
        straight.update(draw(straight))

    resumed = make(squares_with_dropout, schedule=schedule, average_half_life=3.0)
    with torch.no_grad():
        resumed.module.hidden.weight.zero_()
    resumed.load_state(tensors, counters)
    for _ in range(4):
        resumed.update(draw(resumed))
    assert torch.equal(weights(straight), weights(resumed))
    with straight.averaged(), resumed.averaged():
        assert torch.equal(weights(straight), weights(resumed))
    left, right = straight.state(), resumed.state()
    assert left[1] == right[1]
    assert left[1]["updates"] == 8
    assert all(torch.equal(left[0][name], right[0][name]) for name in left[0])


def test_a_resumed_run_takes_the_options_that_it_is_given_now():
    tensors, counters = make(schedule=Schedule(warmup=3), max_grad_norm=1.0).state()
    resumed = make(max_grad_norm=0.25)
    resumed.load_state(tensors, counters)
    assert (resumed.schedule, resumed.max_grad_norm) == (Schedule(), 0.25)


def test_state_of_another_module_is_refused():
    tensors, counters = make().state()
    tensors["module.other"] = tensors.pop("module.hidden.weight")
    with pytest.raises(KeyError, match="other"):
        make().load_state(tensors, counters)


@given(st.integers(0, 50), st.integers(0, 50), st.integers(0, 500))
def test_the_schedule_warms_up_then_falls_to_its_floor(warmup, decay, update):
    schedule = Schedule(warmup=warmup, decay=decay, floor=0.1)
    factor = schedule.factor(update)
    assert 0.0 < factor <= 1.0
    if update < warmup:
        assert factor == pytest.approx((update + 1) / warmup)
    elif decay == 0:
        assert factor == 1.0
    elif update >= warmup + decay:
        assert factor == pytest.approx(0.1)
    else:
        assert factor >= schedule.factor(update + 1)
