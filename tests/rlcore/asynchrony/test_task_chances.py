"""Tasks whose groups agree come up less, but each comes up again; and updates get their groups sooner."""

from __future__ import annotations

import json
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlcore.asynchrony.errors import EventError
from rlcore.asynchrony.task_chances import FLOOR, MOST_PASSED, MOST_TASKS, TaskChances
from rlcore.asynchrony.task_order import TaskOrder

GROUP = 12


def chances(seed: int = 0) -> TaskChances:
    return TaskChances(seed, GROUP)


def test_what_is_not_known_is_taken():
    assert chances().chance("new") == 1.0
    assert all(chances(seed).takes("new", 0) for seed in range(50))


def test_solved_and_hopeless_tasks_come_up_less_than_others():
    of = chances()
    for _ in range(4):
        of.finished("solved", GROUP, 0)
        of.finished("hopeless", 0, GROUP)
        of.finished("half", GROUP // 2, GROUP // 2)
        of.finished("nearly", GROUP - 1, 1)
    assert of.chance("half") == 1.0
    assert of.chance("solved") == pytest.approx(of.chance("hopeless"))
    assert of.chance("solved") < 0.25
    assert of.chance("solved") < of.chance("nearly") <= of.chance("half")


def test_a_task_that_was_forgotten_is_practised_again():
    of = chances()
    for _ in range(20):
        of.finished("task", GROUP, 0)
    low = of.chance("task")
    of.finished("task", GROUP - 4, 4)
    assert of.chance("task") > 3 * low


@given(st.lists(st.integers(0, GROUP), max_size=60))
def test_a_chance_is_never_less_than_the_floor(groups):
    of = TaskChances(0, GROUP)
    for right in groups:
        of.finished("task", right, GROUP - right)
    assert FLOOR <= of.chance("task") <= 1.0


def test_no_task_is_passed_over_longer_than_the_most():
    of = chances()
    for _ in range(60):
        of.finished("task", GROUP, 0)
    taken = "".join("x" if of.takes("task", turn) else "." for turn in range(20_000))
    assert max(len(run) for run in taken.split("x")) == MOST_PASSED


@given(
    groups=st.lists(
        st.tuples(st.sampled_from("ab"), st.sampled_from([0, GROUP, GROUP, GROUP // 2])),
        max_size=60,
    ),
    at=st.integers(0, 60),
)
def test_a_resumed_run_takes_the_same_turns(groups, at):
    whole, first = chances(), chances()
    for turn, (task, right) in enumerate(groups[:at]):
        for of in (whole, first):
            of.finished(task, right, GROUP - right)
            of.takes(task, -turn)
    second = chances()
    second.load_state(json.loads(json.dumps(first.state())))
    for turn, (task, right) in enumerate(groups[at:]):
        assert whole.takes(task, turn) == second.takes(task, turn)
        for of in (whole, second):
            of.finished(task, right, GROUP - right)
    assert whole._known == second._known


def test_the_seed_decides_which_turns_are_passed_over():
    def taken(seed: int) -> list[bool]:
        of = chances(seed)
        for _ in range(5):
            of.finished("task", GROUP, 0)
        return [of.takes("task", turn) for turn in range(40)]

    assert taken(0) == taken(0)
    assert taken(0) != taken(1)


def test_only_so_many_tasks_are_remembered():
    of = chances()
    for i in range(MOST_TASKS + 5):
        of.finished(str(i), GROUP, 0)
    assert of.chance("4") == 1.0
    assert of.chance("5") < 1.0


def test_a_group_of_less_than_nothing_is_refused():
    with pytest.raises(EventError):
        chances().finished("task", -1, 3)


def groups_played(
    rates: list[float], needed: int, weighed: bool, seed: int
) -> tuple[int, set[int]]:
    """Groups played until so many had rewards that differ, and the tasks that were played."""
    draw, order, of = Random(seed), TaskOrder(seed, len(rates)), TaskChances(seed, GROUP)
    played = useful = 0
    tasks = set()
    while useful < needed:
        turn = order.take()
        if weighed and not of.takes(str(turn.task), turn.position):
            order.passed_over(turn.position)
            continue
        right = sum(draw.random() < rates[turn.task] for _ in range(GROUP))
        of.finished(str(turn.task), right, GROUP - right)
        order.finished(turn.position)
        order.trained(turn.position)
        played += 1
        useful += 0 < right < GROUP
        tasks.add(turn.task)
    return played, tasks


LATE = [0.995] * 54 + [0.5] * 6
"""Solve rates at the end of a run like the quickstart's: sixty different tasks."""

EARLY = [0.05 + 0.9 * i / 59 for i in range(60)]


def test_late_in_a_run_an_update_needs_fewer_groups():
    plain = sum(groups_played(LATE, 160, False, seed)[0] for seed in range(5))
    weighed = sum(groups_played(LATE, 160, True, seed)[0] for seed in range(5))
    assert weighed < 0.6 * plain


def test_early_in_a_run_nearly_nothing_changes():
    plain = sum(groups_played(EARLY, 160, False, seed)[0] for seed in range(5))
    weighed = sum(groups_played(EARLY, 160, True, seed)[0] for seed in range(5))
    assert weighed < 1.05 * plain


def test_every_task_is_played():
    assert len(groups_played(LATE, 400, True, 0)[1]) == len(LATE)
