"""Over a kill no task is lost or trained twice, and no other run's checkpoint is taken."""

from __future__ import annotations

import errno
from collections import Counter
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import SafetensorError

from rlcore import checkpoint
from rlcore.asynchrony.admission import Admission
from rlcore.asynchrony.task_order import TaskOrder
from rlcore.asynchrony.token_ledger import Fate, TokenLedger
from rlcore.errors import UsageError
from rlcore.rl.rollouts import Books
from rlcore.rl.saved import FOLDER, facts_of, load, restore, save
from rlcore.rollout import Rollout
from tests.rlcore.rl.made import a_rollout

STALENESS, GROUPS, GROUP_SIZE = 1, 2, 2
IDENTITY = {"model": "abc", "environment": "tools", "environment options": {"items": 2}, "seed": 7}


def new_books(size: int | None) -> Books:
    return Books(Admission(STALENESS, GROUPS), TaskOrder(7, size), TokenLedger())


class Bookkeeping:
    """A run without rollouts: the events that it would enter, and what was trained on."""

    def __init__(self, books: Books) -> None:
        self.books = books
        self.running: list[str] = []
        self.waiting: dict[str, list[Rollout]] = {}
        self.done: Counter[int] = Counter()
        """Positions trained on, dropped or given up."""

    def step(self, kind: str, pick: int) -> None:
        match kind:
            case "admit" if self.books.admission.capacity:
                name = str(self.books.order.take().position)
                self.books.admission.admit(name)
                self.running.append(name)
            case "sample" if self.running:
                name = self.running[pick % len(self.running)]
                self.books.ledger.sampled(f"{name}.0", 0 if pick % 5 == 0 else 3)
            case "finish" if self.running:
                self.finish(self.running.pop(pick % len(self.running)))
            case "drop" if self.running:
                self.drop(self.running.pop(pick % len(self.running)))
            case "give up" if self.running:
                self.give_up(self.running.pop(pick % len(self.running)))
            case "train":
                self.train()

    def ended(self, name: str) -> list[Rollout]:
        books, group = self.books, []
        for number in range(GROUP_SIZE):
            rollout = f"{name}.{number}"
            if rollout in books.ledger.open:
                books.ledger.lost(rollout)  # an attempt that failed
            books.ledger.sampled(rollout, 2)
            books.ledger.finished(rollout)
            version = books.admission.published_version
            group.append(a_rollout(rollout, version=version, reward=float(number)))
        return group

    def finish(self, name: str) -> None:
        group = self.ended(name)
        self.books.order.finished(int(name))
        self.books.admission.finished(name, [r.oldest_version for r in group])
        self.waiting[name] = group

    def drop(self, name: str) -> None:
        for rollout in self.ended(name):
            self.books.ledger.settled(rollout.rollout_id, {Fate.ZERO_ADVANTAGE: 2})
        self.books.order.finished(int(name))
        self.books.admission.dropped(name)
        self.books.order.trained(int(name))
        self.done[int(name)] += 1

    def give_up(self, name: str) -> None:
        for rollout in list(self.books.ledger.open):
            if rollout.split(".")[0] == name:
                self.books.ledger.lost(rollout)
        self.books.admission.dropped(name)
        self.books.order.given_up(int(name))
        self.done[int(name)] += 1

    def train(self) -> None:
        batch = self.books.admission.take_batch()
        if not batch:
            return
        for name in batch:
            for rollout in self.waiting.pop(name):
                self.books.ledger.settled(rollout.rollout_id, {Fate.TRAINED: rollout.sampled})
            self.done[int(name)] += 1
        self.books.admission.trained(dict.fromkeys(batch, 0), 1)
        for name in batch:
            self.books.order.trained(int(name))
        self.books.admission.published(self.books.admission.version)


STEPS = st.lists(
    st.tuples(
        st.sampled_from(
            ["admit", "admit", "sample", "finish", "finish", "drop", "give up", "train"]
        ),
        st.integers(0, 99),
    ),
    max_size=40,
)


def saved_and_loaded(folder: Path, run: Bookkeeping):
    state = ({"module.w": torch.arange(3.0)}, {"updates": 1})
    save(folder, facts_of(IDENTITY, run.books, run.waiting, {"temperature": {"seen": 2}}), state)
    return load(folder, IDENTITY)


@settings(max_examples=60)
@given(before=STEPS, lost=STEPS, after=STEPS, size=st.sampled_from([None, 3, 50]))
def test_over_a_kill_nothing_is_lost_or_trained_twice(tmp_path_factory, before, lost, after, size):
    run = Bookkeeping(new_books(size))
    for step in before:
        run.step(*step)
    folder = tmp_path_factory.mktemp("saved")
    saved = saved_and_loaded(folder, run)
    done, waiting = Counter(run.done), dict(run.waiting)
    assert saved.update == run.books.admission.version
    assert saved.waiting == waiting
    for step in lost:  # what is done after the checkpoint is forgotten
        run.step(*step)

    resumed = Bookkeeping(new_books(size))
    restore(resumed.books, saved)
    resumed.done, resumed.waiting = done, dict(saved.waiting)
    totals = resumed.books.ledger.totals()
    assert totals.in_flight == 0
    assert totals.waiting == sum(r.sampled for group in waiting.values() for r in group)
    assert set(resumed.books.admission.waiting) == set(waiting)
    assert resumed.books.admission.running == ()
    for step in after:
        resumed.step(*step)
    for name in list(resumed.running):
        resumed.running.remove(name)
        resumed.finish(name)
    for _ in range(20):  # to the end of what has begun
        resumed.train()
    left = {int(name) for name in resumed.waiting} | {*resumed.books.order.state()["again"]}
    cursor = resumed.books.order.state()["cursor"]
    assert set(resumed.done) | left == set(range(cursor))
    assert not set(resumed.done) & left
    assert set(resumed.done.values()) <= {1}
    assert resumed.books.ledger.totals().in_flight == 0


def test_tensors_and_facts_come_back(tmp_path):
    saved = saved_and_loaded(tmp_path, Bookkeeping(new_books(None)))
    assert saved.tensors["module.w"].tolist() == [0, 1, 2]
    assert saved.counters == {"updates": 1}
    assert saved.controllers == {"temperature": {"seen": 2}}


@pytest.mark.parametrize("name", list(IDENTITY))
def test_another_runs_checkpoint_is_refused_in_one_line(tmp_path, name):
    saved_and_loaded(tmp_path, Bookkeeping(new_books(None)))
    with pytest.raises(UsageError) as error:
        load(tmp_path, {**IDENTITY, name: "another"})
    line = str(error.value)
    assert "\n" not in line
    assert name in line
    assert str(IDENTITY[name]) in line
    assert "another" in line


def test_without_a_checkpoint_there_is_nothing_to_resume(tmp_path):
    with pytest.raises(UsageError, match="no checkpoint to resume from"):
        load(tmp_path, IDENTITY)


@pytest.mark.parametrize("file", [checkpoint.FACTS, checkpoint.TENSORS])
@pytest.mark.parametrize("keep", [0, 20])
def test_a_damaged_checkpoint_is_refused_in_one_line(tmp_path, file, keep):
    saved_and_loaded(tmp_path, Bookkeeping(new_books(None)))
    path = tmp_path / FOLDER / file
    path.write_bytes(path.read_bytes()[:keep])
    refused(tmp_path)


@pytest.mark.parametrize(
    "facts", ["[]", "{}", '{"identity": {}}', '{"identity": 3}', '{"identity": {"model": "abc"}}']
)
def test_a_checkpoint_of_another_form_is_refused_in_one_line(tmp_path, facts):
    saved_and_loaded(tmp_path, Bookkeeping(new_books(None)))
    (tmp_path / FOLDER / checkpoint.FACTS).write_text(facts)
    refused(tmp_path)


def refused(folder: Path) -> None:
    with pytest.raises(UsageError, match="checkpoint") as error:
        load(folder, IDENTITY)
    assert "\n" not in str(error.value)
    assert "--out" in str(error.value)


@pytest.mark.parametrize(
    "fault", [OSError(errno.ENOSPC, "No space left on device"), SafetensorError("I/O error")]
)
def test_a_full_disk_leaves_the_checkpoint_before(tmp_path, monkeypatch, fault):
    run = Bookkeeping(new_books(None))
    saved_and_loaded(tmp_path, run)

    def full(*_: object, **__: object) -> None:
        raise fault

    run.step("admit", 0)
    with monkeypatch.context() as patched:
        patched.setattr(checkpoint, "save_file", full)
        with pytest.raises(OSError, match=r"No space|I/O error"):
            saved_and_loaded(tmp_path, run)
    assert load(tmp_path, IDENTITY).books["order"]["cursor"] == 0
    assert [path.name for path in tmp_path.iterdir()] == [FOLDER]


def test_other_bounds_are_refused_when_the_books_are_restored(tmp_path):
    saved = saved_and_loaded(tmp_path, Bookkeeping(new_books(None)))
    other = Books(Admission(STALENESS, GROUPS + 1), TaskOrder(7, None), TokenLedger())
    with pytest.raises(UsageError, match="resume with the same"):
        restore(other, saved)
