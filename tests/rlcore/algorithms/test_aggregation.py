import pytest
import torch

from rlcore.algorithms.aggregation import AGGREGATIONS, token_weights


@pytest.mark.parametrize(
    ("aggregation", "weights", "normaliser"),
    [
        ("token_mean", [1, 1, 1, 1, 1], 5),
        ("sequence_mean", [0.5, 1 / 3, 0.5, 1 / 3, 1 / 3], 2),
        ("constant_length", [0.1] * 5, 2),
    ],
)
def test_weights_of_scattered_sequences(aggregation, weights, normaliser):
    found, total = token_weights(aggregation, torch.tensor([4, 9, 4, 9, 9]), max_tokens=10)
    torch.testing.assert_close(found, torch.tensor(weights).float())
    assert total == normaliser


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_a_batch_without_tokens_has_no_weight(aggregation):
    weights, total = token_weights(aggregation, torch.zeros(0, dtype=torch.int64), max_tokens=10)
    assert weights.shape == (0,)
    assert total == 0
