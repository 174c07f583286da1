"""No task is skipped, lost or trained twice, wherever the run is killed."""

from __future__ import annotations

import json
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlcore.asynchrony.errors import EventError
from rlcore.asynchrony.task_order import TaskOrder
from rlcore.errors import UsageError


class Run:
    """A run loop that trains in any order, saves now and then, and is killed now and then."""

    def __init__(self, size: int | None, seed: int) -> None:
        self.size = size
        self.draw = random.Random(seed)
        self.order = TaskOrder(7, size)
        self.policy: list[tuple[int, int]] = []
        """(position, task) that the policy was trained on."""
        self.buffer: dict[int, int] = {}
        """Finished rollouts: position -> task."""
        self.in_flight: dict[int, int] = {}
        self.save()

    def save(self) -> None:
        self.saved = json.dumps([self.order.state(), self.policy, sorted(self.buffer.items())])

    def kill(self) -> None:
        state, policy, buffer = json.loads(self.saved)
        self.policy = [(position, task) for position, task in policy]
        self.buffer = {p: task for p, task in buffer if self.draw.random() < 0.5}
        self.in_flight = {}
        self.order = TaskOrder(7, self.size)
        self.order.load_state(state, self.buffer.keys())
        self.save()  # what came back is what the next kill finds

    def step(self, may_take: bool, may_fail: bool) -> None:
        event = self.draw.choice(["take", "take", "finish", "train", "fail", "save"])
        if event == "take" and may_take:
            turn = self.order.take()
            assert turn.position not in self.in_flight
            self.in_flight[turn.position] = turn.task
        elif event == "finish" and self.in_flight:
            position = self.draw.choice(sorted(self.in_flight))
            self.order.finished(position)
            self.buffer[position] = self.in_flight.pop(position)
        elif event == "train" and self.buffer:
            position = self.draw.choice(sorted(self.buffer))
            self.order.trained(position)
            self.policy.append((position, self.buffer.pop(position)))
        elif event == "fail" and may_fail and {**self.in_flight, **self.buffer}:
            position = self.draw.choice(sorted({**self.in_flight, **self.buffer}))
            self.order.returned(position)
            self.in_flight.pop(position, None)
            self.buffer.pop(position, None)
        elif event == "save":
            self.save()


@given(st.integers(0, 10**9), st.sampled_from([None, 1, 3, 10]), st.integers(0, 6))
def test_over_any_kill_every_turn_is_trained_once(seed, size, kills):
    run = Run(size, seed)
    for _ in range(kills + 1):
        for _ in range(run.draw.randrange(60)):
            run.step(True, True)
            assert run.order.trained_count == len(run.policy)
        run.kill()
    while run.order.trained_count < 30:
        run.step(len(run.in_flight) < 3, False)
    while run.in_flight or run.buffer or run.order.state()["again"]:
        run.step(bool(run.order.state()["again"]), False)
    positions = sorted(position for position, _ in run.policy)
    assert positions == list(range(len(positions)))
    if size is None:
        assert all(position == task for position, task in run.policy)
    else:
        for epoch in range(len(positions) // size):
            tasks = [task for position, task in run.policy if position // size == epoch]
            assert sorted(tasks) == list(range(size))


@given(st.integers(0, 10**6), st.sampled_from([None, 5]), st.integers(0, 3))
def test_over_any_kill_every_turn_is_trained_or_passed_over_once(seed, size, kills):
    draw, order = random.Random(seed), TaskOrder(3, size)
    done: dict[int, str] = {}
    saved = json.dumps([order.state(), {}])
    for _ in range(kills + 1):
        for _ in range(draw.randrange(1, 40)):
            turn = order.take()
            assert str(turn.position) not in done
            if draw.random() < 0.5:
                order.passed_over(turn.position)
                done[str(turn.position)] = "passed over"
            elif draw.random() < 0.8:
                order.finished(turn.position)
                order.trained(turn.position)
                done[str(turn.position)] = "trained"
            if draw.random() < 0.2:
                saved = json.dumps([order.state(), done])
        state, done = json.loads(saved)
        order = TaskOrder(3, size)
        order.load_state(state)
    state = order.state()
    waiting = {*state["again"], *state["in_flight"]}
    assert {int(p) for p in done} | waiting == set(range(state["cursor"]))
    assert order.trained_count == len(done)


@given(st.integers(0, 100), st.integers(1, 50))
def test_every_epoch_has_every_task_once_in_the_order_of_its_seed(seed, size):
    order, same = TaskOrder(seed, size), TaskOrder(seed, size)
    turns = [order.take() for _ in range(3 * size)]
    assert turns == [same.take() for _ in range(3 * size)]
    for epoch in range(3):
        tasks = [turn.task for turn in turns if turn.epoch == epoch]
        assert sorted(tasks) == list(range(size))


def test_epochs_and_seeds_have_orders_of_their_own():
    def first(seed: int, epoch: int) -> list[int]:
        return [TaskOrder(seed, 20).turn(epoch * 20 + i).task for i in range(20)]

    assert len({tuple(first(seed, epoch)) for seed in range(3) for epoch in range(3)}) == 9
    assert first(0, 0)[:5] == [14, 3, 8, 11, 18]  # of old checkpoints, too


def test_what_comes_back_goes_first():
    order = TaskOrder(0)
    for _ in range(4):
        order.take()
    order.returned(2)
    order.returned(1)
    assert [order.take().position for _ in range(3)] == [1, 2, 4]


def test_the_state_stays_small():
    order = TaskOrder(0)
    for _ in range(10_000):
        turn = order.take()
        order.finished(turn.position)
        order.trained(turn.position)
    order.given_up(order.take().position)
    assert len(json.dumps(order.state())) < 150
    assert order.trained_count == 10_001


@pytest.mark.parametrize("event", ["finished", "returned", "trained", "given_up", "passed_over"])
def test_a_fate_that_cannot_be_is_refused(event):
    order = TaskOrder(0)
    turn = order.take()
    order.finished(turn.position)
    order.trained(turn.position)
    for position in (turn.position, 5):
        with pytest.raises(EventError, match=f"turn {position} "):
            getattr(order, event)(position)


def test_a_checkpoint_of_other_tasks_or_rollouts_is_refused():
    state = TaskOrder(1, 10).state()
    with pytest.raises(UsageError, match="of 10 tasks with seed 1, not 11 tasks with seed 1"):
        TaskOrder(1, 11).load_state(state)
    with pytest.raises(UsageError, match="not tasks without end with seed 1"):
        TaskOrder(1).load_state(state)
    with pytest.raises(EventError, match=r"turns \[3\] were not finished"):
        TaskOrder(1, 10).load_state(state, [3])
    with pytest.raises(UsageError, match="no tasks"):
        TaskOrder(1, 0)
