"""What completes a group worth training on runs first, and everything runs in the end."""

from __future__ import annotations

import heapq
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlcore.asynchrony.priority import LARGEST_BONUS, GroupProgress, request_priority
from rlcore.errors import PacelineError

SIZE = 8

rewards = st.lists(st.sampled_from([-1.0, 0.0, 1.0]), max_size=SIZE - 1)


@given(st.integers(0, 1000), st.integers(0, SIZE - 2))
def test_groups_nearer_to_completion_go_first(admitted, finished):
    less = request_priority(GroupProgress(admitted, SIZE, [1.0] * finished))
    more = request_priority(GroupProgress(admitted, SIZE, [1.0] * (finished + 1)))
    assert more < less


@given(st.integers(2, SIZE - 1))
def test_groups_with_mixed_rewards_go_first(finished):
    same = request_priority(GroupProgress(0, SIZE, [0.0] * finished))
    mixed = request_priority(GroupProgress(0, SIZE, [1.0] + [0.0] * (finished - 1)))
    assert mixed < same


@given(rewards, st.integers(0, 1000))
def test_the_older_of_equals_goes_first(known, admitted):
    older = request_priority(GroupProgress(admitted, SIZE, known))
    assert older < request_priority(GroupProgress(admitted + 1, SIZE, known))


@given(rewards, st.integers(0, 10**6))
def test_whatever_comes_after_it_every_request_is_first_in_the_end(own, seed):
    """Three requests come for each one that runs, so the queue only grows."""
    draw = random.Random(seed)
    queue = [(request_priority(GroupProgress(0, SIZE, own)), 0)]
    for admitted in range(1, 400):
        known = draw.choices([0.0, 1.0], k=draw.randrange(SIZE))
        priority = request_priority(GroupProgress(admitted, SIZE, known))
        heapq.heappush(queue, (priority, admitted))
        if admitted % 3 == 0 and heapq.heappop(queue)[1] == 0:
            return
    pytest.fail("never ran")


@given(rewards, rewards, st.integers(0, 100))
def test_no_request_is_overtaken_by_one_admitted_much_later(own, other, admitted):
    mine = request_priority(GroupProgress(admitted, SIZE, own))
    later = GroupProgress(admitted + LARGEST_BONUS + 1, SIZE, other)
    assert mine < request_priority(later)


def test_a_group_of_one_has_only_its_age():
    assert request_priority(GroupProgress(5, 1)) == 5


def test_a_complete_group_is_refused():
    with pytest.raises(PacelineError, match="needs no more"):
        request_priority(GroupProgress(0, 2, [1.0, 0.0]))
