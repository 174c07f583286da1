import math

import pytest
import torch

from rlcore.algorithms import policy_losses
from tests.rlcore.algorithms.batches import random_batch

LENGTHS = [4, 1, 6, 2]


def apply(loss, batch):
    logprobs, old, advantages = batch.logprobs, batch.old_logprobs, batch.advantages
    match loss:
        case "ppo":
            return policy_losses.ppo(logprobs, old, advantages, 0.2, 0.28, 3.0)
        case "gspo":
            return policy_losses.gspo(logprobs, old, advantages, batch.sequence, 0.2, 0.28)
        case "cispo":
            return policy_losses.cispo(logprobs, old, advantages, 1.0, 4.0)
        case "reinforce":
            return policy_losses.reinforce(logprobs, old, advantages)


LOSSES = ["ppo", "gspo", "cispo", "reinforce"]


@pytest.mark.parametrize("loss", LOSSES)
def test_on_policy_the_gradient_is_the_plain_policy_gradient(loss):
    batch = random_batch(LENGTHS, update=0.0)
    result = apply(loss, batch)
    result.loss.sum().backward()
    torch.testing.assert_close(batch.logprobs.grad, -batch.advantages)
    assert torch.equal(result.ratio, torch.ones_like(result.ratio))
    assert not (result.clipped_low | result.clipped_high).any()


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("update", [0.5, 1000.0])
def test_without_advantage_the_gradient_is_exactly_zero(loss, update):
    """Also where a ratio alone would overflow."""
    batch = random_batch(LENGTHS, update=update)
    batch.advantages = torch.zeros_like(batch.advantages)
    apply(loss, batch).loss.sum().backward()
    assert torch.equal(batch.logprobs.grad, torch.zeros_like(batch.logprobs))


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "slope", "low", "high"),
    [
        (1.1, 2.0, -2.2, -2.2, False, False),
        (1.5, 2.0, -2.56, 0.0, False, True),
        (0.5, 2.0, -1.0, -1.0, False, False),
        (0.5, -2.0, 1.6, 0.0, True, False),
        (1.5, -2.0, 3.0, 3.0, False, False),
        (4.0, -2.0, 6.0, 0.0, False, True),
        (4.0, 2.0, -2.56, 0.0, False, True),
    ],
)
def test_ppo_is_bounded_on_the_side_where_the_advantage_pushes(
    ratio, advantage, loss, slope, low, high
):
    logprob = torch.tensor([math.log(ratio)], requires_grad=True)
    result = policy_losses.ppo(
        logprob, torch.zeros(1), torch.tensor([advantage]), 0.2, 0.28, dual_clip=3.0
    )
    result.loss.sum().backward()
    assert result.loss.item() == pytest.approx(loss)
    assert logprob.grad.item() == pytest.approx(slope)
    assert (result.clipped_low.item(), result.clipped_high.item()) == (low, high)


def test_gspo_has_the_value_and_the_gradient_of_the_sequence_form():
    """J = mean over sequences of min(s A, clip(s) A), s = (pi / pi_old)^(1 / length)."""
    batch = random_batch(LENGTHS)
    result = apply("gspo", batch)
    weights = torch.cat([torch.full((n,), 1 / n) for n in LENGTHS])
    ours = (result.loss * weights).sum()
    (gradient,) = torch.autograd.grad(ours, batch.logprobs)
    log_ratio = batch.logprobs - batch.old_logprobs
    total = torch.zeros(())
    clipped = 0
    for part, advantages in zip(
        log_ratio.split(LENGTHS), batch.advantages.split(LENGTHS), strict=True
    ):
        s, advantage = part.mean().exp(), advantages[0]
        total = total - torch.minimum(s * advantage, s.clamp(0.8, 1.28) * advantage)
        clipped += bool(s.clamp(0.8, 1.28) != s)
    torch.testing.assert_close(ours, total)
    torch.testing.assert_close(gradient, torch.autograd.grad(total, batch.logprobs)[0])
    assert 0 < clipped < len(LENGTHS)


def test_gspo_gives_each_token_its_own_weight_and_advantage():
    batch = random_batch([3], update=0.1)
    advantages = torch.tensor([1.0, -2.0, 0.5])
    result = policy_losses.gspo(
        batch.logprobs, batch.old_logprobs, advantages, batch.sequence, 0.5, 0.5
    )
    weights = torch.tensor([0.0, 1.0, 3.0])
    (result.loss * weights).sum().backward()
    ratio = (batch.logprobs - batch.old_logprobs).detach().mean().exp()
    torch.testing.assert_close(batch.logprobs.grad, -ratio * advantages * weights)


def test_cispo_keeps_the_gradient_of_a_token_beyond_its_bounds():
    logprobs = torch.tensor([math.log(9.0), math.log(2.0), math.log(0.1)], requires_grad=True)
    advantages = torch.tensor([1.0, -1.0, 1.0])
    result = policy_losses.cispo(logprobs, torch.zeros(3), advantages, 0.5, 4.0)
    result.loss.sum().backward()
    torch.testing.assert_close(logprobs.grad, torch.tensor([-5.0, 2.0, -0.5]))
    assert result.clipped_high.tolist() == [True, False, False]
    assert result.clipped_low.tolist() == [False, False, True]
