import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlcore.algorithms.corrections import BOUNDS, CORRECTIONS, mismatch_kl
from tests.rlcore.algorithms.batches import random_batch

SEQUENCE = torch.tensor([0, 0, 1, 1, 2])
RATIOS = torch.tensor([3.0, 0.4, 2.0, 6.0, 1.0])
"""Of the three sequences: products 1.2, 12 and 1; geometric means 1.095, 3.46 and 1."""


def weights(correction, ratios=RATIOS, sequence=SEQUENCE, bounds=None):
    old = -5.0 - torch.arange(len(ratios)).float()
    inference = old - ratios.log()
    return CORRECTIONS[correction](old, inference, sequence, bounds or BOUNDS[correction])


@pytest.mark.parametrize(
    ("correction", "expected"),
    [
        ("none", [1, 1, 1, 1, 1]),
        ("token_tis", [2, 0.4, 2, 2, 1]),
        ("sequence_tis", [1.2, 1.2, 2, 2, 1]),
        ("sequence_mask", [1.2, 1.2, 0, 0, 1]),
        ("icepop", [3, 0, 2, 0, 1]),
        ("geometric_mask", [0, 0, 0, 0, 1]),
    ],
)
def test_weights_by_hand(correction, expected):
    torch.testing.assert_close(weights(correction), torch.tensor(expected).float())


def test_bounds_can_be_other_than_the_published():
    assert weights("geometric_mask", bounds=(0.5, 2.0)).tolist() == [1, 1, 0, 0, 1]
    torch.testing.assert_close(
        weights("icepop", bounds=(0.0, 3.5)), torch.tensor([3, 0.4, 2, 0, 1])
    )


@pytest.mark.parametrize("correction", CORRECTIONS)
def test_the_same_policy_needs_no_correction(correction):
    batch = random_batch([5, 1, 30], mismatch=0.0)
    found = CORRECTIONS[correction](
        batch.old_logprobs, batch.inference_logprobs, batch.sequence, BOUNDS[correction]
    )
    assert torch.equal(found, torch.ones_like(found))


@pytest.mark.parametrize("correction", CORRECTIONS)
def test_weights_are_finite_and_carry_no_gradient(correction):
    ratios = torch.tensor([1e30, 1e30, 1e-30, 1e-30, 1.0])
    assert torch.isfinite(weights(correction, ratios)).all()
    old = torch.zeros(5, requires_grad=True)
    found = CORRECTIONS[correction](old, torch.zeros(5), SEQUENCE, BOUNDS[correction])
    assert not found.requires_grad


@pytest.mark.parametrize("correction", set(CORRECTIONS) - {"none"})
def test_a_log_probability_that_is_nan_is_not_taken_for_a_masked_token(correction):
    ratios = RATIOS.clone()
    ratios[2] = math.nan
    found = weights(correction, ratios)
    assert torch.isnan(found[2])
    assert torch.isfinite(found[[0, 1, 4]]).all()


@given(data=st.data())
@pytest.mark.parametrize("correction", CORRECTIONS)
def test_the_order_of_tokens_does_not_matter(correction, data):
    order = torch.tensor(data.draw(st.permutations(range(5))))
    old = torch.zeros(5)
    moved = CORRECTIONS[correction](old, -RATIOS[order].log(), SEQUENCE[order], BOUNDS[correction])
    torch.testing.assert_close(
        moved, CORRECTIONS[correction](old, -RATIOS.log(), SEQUENCE, BOUNDS[correction])[order]
    )


def test_the_mismatch_is_the_kl_from_the_sampling_policy_to_the_trainers():
    """Exactly, over all tokens of a small vocabulary weighted by the policy that samples."""
    inference = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)
    trainer = torch.tensor([0.4, 0.4, 0.2], dtype=torch.float64)
    kl = float((inference * (inference / trainer).log()).sum())
    for estimate in mismatch_kl(trainer.log(), inference.log()):
        assert float((inference * estimate).sum()) == pytest.approx(kl)
