import pytest
import torch

from rlcore.algorithms.kl import k1, k2, k3

LOGITS = torch.tensor([0.3, -0.2, 0.5, 0.0], dtype=torch.float64)
REFERENCE = torch.tensor([0.2, -0.1, 0.4, 0.1], dtype=torch.float64).log_softmax(0)


def exact(p, q):
    return (p.exp() * (p - q)).sum()


def gradient_of(function):
    logits = LOGITS.clone().requires_grad_()
    return torch.autograd.grad(function(logits.log_softmax(0)), logits)[0]


def mean_of(estimate):
    """What samples from p average to; as in training, the sampling itself has no gradient."""
    return lambda p: (p.detach().exp() * estimate(p, REFERENCE)).sum()


@pytest.mark.parametrize(("estimate", "tolerance"), [(k1, 1e-9), (k2, 0.02), (k3, 1e-9)])
def test_estimates_average_to_the_divergence(estimate, tolerance):
    p = LOGITS.log_softmax(0)
    assert mean_of(estimate)(p).item() == pytest.approx(exact(p, REFERENCE).item(), rel=tolerance)


def test_gradients_of_the_estimates_as_a_loss():
    forward = gradient_of(lambda p: exact(p, REFERENCE))
    backward = gradient_of(lambda p: exact(REFERENCE, p))
    torch.testing.assert_close(gradient_of(mean_of(k1)), torch.zeros_like(LOGITS))
    torch.testing.assert_close(gradient_of(mean_of(k2)), forward)
    torch.testing.assert_close(gradient_of(mean_of(k3)), backward)


def test_k3_of_a_tiny_difference_is_not_lost_to_rounding():
    """In float32, exp(x) - 1 - x would be 0 or 1.2e-7 here."""
    p = torch.tensor([0.0])
    assert k3(p, p + 1e-4).item() == pytest.approx(5e-9, rel=1e-3)


def test_k3_of_a_huge_difference_is_finite():
    p = torch.tensor([0.0, 0.0], requires_grad=True)
    estimate = k3(p, torch.tensor([1000.0, -1000.0]))
    estimate.sum().backward()
    assert torch.isfinite(estimate).all()
    assert torch.isfinite(p.grad).all()
