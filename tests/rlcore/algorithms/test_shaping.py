import pytest
import torch

from rlcore.algorithms.segments import BatchError
from rlcore.algorithms.shaping import overlong_penalty


def test_the_penalty_grows_over_the_buffer():
    lengths = torch.tensor([0, 80, 81, 90, 100, 150])
    penalty = overlong_penalty(lengths, max_tokens=100, buffer=20)
    torch.testing.assert_close(penalty, torch.tensor([0, 0, -0.05, -0.5, -1, -1]))


@pytest.mark.parametrize("buffer", [0, -1, 101])
def test_a_buffer_that_does_not_fit_is_refused(buffer):
    with pytest.raises(BatchError, match=f"overlong buffer is {buffer} tokens"):
        overlong_penalty(torch.tensor([1]), max_tokens=100, buffer=buffer)
