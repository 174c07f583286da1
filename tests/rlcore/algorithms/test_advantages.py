from itertools import chain

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlcore.algorithms.advantages import ADVANTAGES, RewardError
from rlcore.algorithms.segments import BatchError

WITHIN_GROUPS = ["group_norm", "group_mean", "leave_one_out", "group_mean_batch_norm"]

rewards_of_a_group = st.lists(
    st.sampled_from([-2.0, -1.0, 0.0, 0.1, 0.3, 1.0]) | st.floats(-100, 100, width=32),
    min_size=1,
    max_size=9,
)
groups = st.lists(rewards_of_a_group, min_size=1, max_size=5)


def packed(rewards_of_groups):
    """Numbered with gaps, in no order."""
    group = [7 * (5 - i) for i, rewards in enumerate(rewards_of_groups) for _ in rewards]
    return torch.tensor(list(chain(*rewards_of_groups))), torch.tensor(group)


def by_hand(kind, rewards_of_groups):
    """From the papers, one rollout at a time."""
    everything = np.concatenate(rewards_of_groups)
    centred = np.concatenate([np.array(r) - np.mean(r) for r in rewards_of_groups])
    advantages = []
    for rewards in rewards_of_groups:
        for i, reward in enumerate(rewards):
            others = rewards[:i] + rewards[i + 1 :]
            if kind == "batch_norm":
                same, value = len(set(everything)) == 1, reward - np.mean(everything)
            else:
                same, value = len(set(rewards)) == 1, reward - np.mean(rewards)
            if same:
                advantages.append(0.0)
            elif kind == "leave_one_out":
                advantages.append(reward - np.mean(others))
            elif kind == "group_mean":
                advantages.append(value)
            else:
                over = {
                    "group_norm": rewards,
                    "batch_norm": everything,
                    "group_mean_batch_norm": centred,
                }[kind]
                advantages.append(value / (np.std(over, ddof=1) + 1e-6))
    return torch.tensor(np.array(advantages), dtype=torch.float32)


@pytest.mark.parametrize("kind", ADVANTAGES)
@given(rewards_of_groups=groups)
def test_advantages_are_those_of_a_loop_over_the_formulas(kind, rewards_of_groups):
    rewards, group = packed(rewards_of_groups)
    rewards_of_groups = [
        rewards[group == g].double().tolist() for g in dict.fromkeys(group.tolist())
    ]
    torch.testing.assert_close(
        ADVANTAGES[kind](rewards, group), by_hand(kind, rewards_of_groups), rtol=1e-4, atol=1e-5
    )


@pytest.mark.parametrize("kind", WITHIN_GROUPS)
@given(rewards_of_groups=groups)
def test_advantages_of_a_group_sum_to_zero(kind, rewards_of_groups):
    rewards, group = packed(rewards_of_groups)
    advantages = ADVANTAGES[kind](rewards, group)
    for g in group.unique():
        part = advantages[group == g].double()
        assert abs(part.sum()) <= 1e-6 * max(1.0, part.abs().sum())


@pytest.mark.parametrize("kind", ADVANTAGES)
@given(rewards_of_groups=groups, data=st.data())
def test_the_order_of_rollouts_does_not_matter(kind, rewards_of_groups, data):
    rewards, group = packed(rewards_of_groups)
    order = torch.tensor(data.draw(st.permutations(range(len(rewards)))))
    moved = ADVANTAGES[kind](rewards[order], group[order])
    torch.testing.assert_close(moved, ADVANTAGES[kind](rewards, group)[order])


@pytest.mark.parametrize("kind", ADVANTAGES)
@pytest.mark.parametrize("reward", [0.1, 1 / 3, -2.0])
@pytest.mark.parametrize("size", [1, 3, 7])
def test_rewards_that_are_all_equal_give_exactly_zero(kind, reward, size):
    """0.1 + 0.1 + 0.1 divided by 3 is not 0.1, and a rest of rounding would be scaled up."""
    rewards = torch.full((size,), reward, dtype=torch.float64)
    assert ADVANTAGES[kind](rewards, torch.zeros(size, dtype=torch.int64)).tolist() == [0.0] * size


@pytest.mark.parametrize("kind", WITHIN_GROUPS)
def test_a_group_of_one_and_an_equal_group_get_nothing_from_the_others(kind):
    rewards = torch.tensor([5.0, 1.0, 0.0, 0.7, 0.7, 0.7])
    advantages = ADVANTAGES[kind](rewards, torch.tensor([0, 1, 1, 2, 2, 2]))
    assert advantages[[0, 3, 4, 5]].tolist() == [0.0] * 4
    assert advantages[1] > 0 > advantages[2]


def test_the_deviation_is_that_of_a_sample():
    advantages = ADVANTAGES["group_norm"](torch.tensor([1.0, 0.0]), torch.tensor([0, 0]))
    assert advantages.tolist() == pytest.approx([0.5**0.5, -(0.5**0.5)], rel=1e-5)


@pytest.mark.parametrize("kind", ADVANTAGES)
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_reward_that_is_not_finite_is_refused_by_its_place(kind, bad):
    rewards = torch.tensor([1.0, bad, 0.0])
    with pytest.raises(RewardError, match=r"rollout 1 .* is (nan|inf) \(1 of 3"):
        ADVANTAGES[kind](rewards, torch.tensor([0, 0, 0]))


@pytest.mark.parametrize("kind", ADVANTAGES)
def test_a_group_index_that_does_not_fit_is_refused(kind):
    with pytest.raises(BatchError, match="one value for each"):
        ADVANTAGES[kind](torch.ones(3), torch.tensor([0, 0]))
    with pytest.raises(BatchError, match="int64"):
        ADVANTAGES[kind](torch.ones(2), torch.ones(2))


@pytest.mark.parametrize("kind", ADVANTAGES)
def test_no_rollouts_have_no_advantages(kind):
    none = torch.zeros(0)
    assert ADVANTAGES[kind](none, none.long()).shape == (0,)
