"""Whatever the order of events: nothing too stale is trained, and nothing comes to a standstill."""

from __future__ import annotations

import json

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from rlcore.asynchrony.admission import Admission
from rlcore.asynchrony.errors import EventError
from rlcore.errors import UsageError

GROUP_SIZE = 2


class AnyOrder(RuleBasedStateMachine):
    """Keeps its own account of versions; the machine under test is never asked for them."""

    @initialize(steps=st.integers(0, 3), batch=st.integers(1, 3), version=st.integers(0, 2))
    def start(self, steps: int, batch: int, version: int) -> None:
        self.steps, self.batch = steps, batch
        self.admission = Admission(steps, batch, version)
        self.version = self.published = version
        self.names = 0
        self.running: dict[str, int] = {}
        self.finished: dict[str, list[int]] = {}
        self.taken: tuple[str, ...] = ()
        self.staleness: list[int] = []

    @rule(much=st.booleans())
    def admit(self, much: bool) -> None:
        for _ in range(self.admission.capacity if much else min(1, self.admission.capacity)):
            name = f"g{self.names}"
            self.names += 1
            self.admission.admit(name)
            self.running[name] = self.published

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.running)))
        first = self.running.pop(name)
        version = st.integers(first, self.version)
        self.finished[name] = data.draw(st.lists(version, min_size=1, max_size=GROUP_SIZE))
        self.admission.finished(name, self.finished[name])

    @precondition(lambda self: self.running or set(self.finished) - set(self.taken))
    @rule(data=st.data())
    def drop(self, data: st.DataObject) -> None:
        names = sorted({*self.running, *self.finished} - {*self.taken})
        name = data.draw(st.sampled_from(names))
        self.running.pop(name, None)
        self.finished.pop(name, None)
        self.admission.dropped(name)

    @rule()
    def take(self) -> None:
        batch = self.admission.take_batch()
        if batch:
            assert not self.taken
            assert len(batch) == self.batch
            assert set(batch) <= set(self.finished)
            others = [min(v) for name, v in self.finished.items() if name not in batch]
            assert max(min(self.finished[name]) for name in batch) <= min(others, default=999)
            self.taken = batch

    @precondition(lambda self: self.taken)
    @rule(data=st.data())
    def train(self, data: st.DataObject) -> None:
        groups = data.draw(st.lists(st.sampled_from(self.taken), unique=True))
        self.admission.trained(groups)
        for name in groups:
            self.staleness += [self.version - version for version in self.finished[name]]
        for name in self.taken:
            del self.finished[name]
        self.taken = ()
        self.version += bool(groups)

    @rule(data=st.data())
    def publish(self, data: st.DataObject) -> None:
        self.published = data.draw(st.integers(self.published, self.version))
        self.admission.published(self.published)

    @rule()
    def kill(self) -> None:
        saved = json.loads(json.dumps(self.admission.state()))
        self.admission = Admission(self.steps, self.batch)
        self.admission.load_state(saved)
        self.taken = ()

    @invariant()
    def no_rollout_trained_is_too_stale(self) -> None:
        assert all(0 <= staleness <= self.steps for staleness in self.staleness)
        counted = [self.staleness.count(n) for n in range(self.steps + 1)]
        assert self.admission.histogram == counted

    @invariant()
    def there_is_always_something_to_do(self) -> None:
        assert set(self.admission.running) == set(self.running)
        assert set(self.admission.waiting) == set(self.finished) - set(self.taken)
        if self.taken or self.running:
            return
        if self.published == self.version and self.admission.capacity > 0:
            return
        trial = Admission(self.steps, self.batch)
        trial.load_state(self.admission.state())
        if not trial.take_batch():
            trial.published(self.version)
            assert trial.capacity > 0

    @invariant()
    def enough_finished_and_nothing_older_running_makes_a_batch(self) -> None:
        waiting = len(self.finished) - len(self.taken)
        if self.taken or waiting < self.batch:
            assert not self.admission.blocking()
            return
        trial = Admission(self.steps, self.batch)
        trial.load_state(self.admission.state())
        blocking = trial.blocking()
        assert bool(trial.take_batch()) == (not blocking)
        assert set(blocking) <= set(self.running)


TestAnyOrder = AnyOrder.TestCase
TestAnyOrder.settings = settings(max_examples=150, stateful_step_count=60, deadline=None)


def finish_all(admission: Admission, names: list[str], version: int = 0) -> None:
    for name in names:
        admission.admit(name)
        admission.finished(name, [version] * GROUP_SIZE)


def test_without_off_policy_steps_a_batch_is_of_the_version_that_is_trained():
    admission = Admission(0, 2)
    assert admission.capacity == 2
    finish_all(admission, ["a", "b"])
    assert admission.capacity == 0
    assert admission.take_batch() == ("a", "b")
    admission.trained(["a", "b"])
    assert admission.capacity == 0  # the engines still sample with version 0
    admission.published(1)
    assert admission.capacity == 2


def test_a_long_group_is_waited_for_before_it_is_too_stale_and_not_earlier():
    admission = Admission(2, 1)
    admission.admit("long")
    for version, name in enumerate(["a", "b"]):
        assert admission.capacity > 0
        finish_all(admission, [name], version)
        assert admission.take_batch() == (name,)
        admission.trained([name])
        admission.published(version + 1)
    finish_all(admission, ["c"], 2)
    assert admission.take_batch() == ()
    assert admission.blocking() == ("long",)
    admission.finished("long", [0])
    assert admission.take_batch() == ("long",)
    admission.trained(["long"])
    assert admission.histogram == [2 * GROUP_SIZE, 0, 1]


def test_groups_filtered_out_of_updates_neither_stop_admission_nor_open_it_too_far():
    admission = Admission(1, 2)
    for version in range(20):
        finish_all(admission, [f"{version}-{i}" for i in range(admission.capacity)], version)
        admission.dropped(admission.waiting[-1])  # equal rewards
        batch = admission.take_batch()
        admission.trained(batch[:1])  # and one more found in the batch
        admission.published(version + 1)
        assert 0 < admission.capacity <= 4 - len(admission.waiting)
    assert admission.version == 20


def test_a_batch_with_nothing_to_learn_from_is_no_update():
    admission = Admission(0, 1)
    finish_all(admission, ["a"])
    admission.take_batch()
    admission.trained([])
    assert (admission.version, admission.capacity, admission.histogram) == (0, 1, [0])


def test_tokens_of_a_newer_version_than_at_admission_count_as_that():
    admission = Admission(1, 1)
    finish_all(admission, ["a"])
    admission.admit("b")
    admission.take_batch()
    admission.trained(["a"])
    admission.published(1)
    admission.finished("b", [1, 1])  # it had not begun when version 1 came
    assert admission.take_batch() == ("b",)
    admission.trained(["b"])
    assert admission.histogram == [1 * GROUP_SIZE + 2, 0]


@pytest.mark.parametrize(
    ("event", "words"),
    [
        (lambda a: a.admit("r"), "admitted before"),
        (lambda a: a.admit("new"), "no capacity"),
        (lambda a: a.finished("x", [0]), "not open"),
        (lambda a: a.finished("f", [0]), "finished twice"),
        (lambda a: a.finished("r", []), "no rollout"),
        (lambda a: a.finished("r", [1]), "versions 1 to 1"),
        (lambda a: a.finished("r", [-1]), "versions -1 to -1"),
        (lambda a: a.dropped("x"), "not open"),
        (lambda a: a.trained(["f"]), "not in the batch"),
        (lambda a: a.published(1), "cannot be published"),
    ],
)
def test_an_event_that_cannot_be_is_refused(event, words):
    admission = Admission(0, 2)
    admission.admit("r")
    finish_all(admission, ["f"])
    before = admission.state()
    with pytest.raises(EventError, match=words):
        event(admission)
    assert admission.state() == before


def test_a_batch_in_training_cannot_be_dropped():
    admission = Admission(0, 1)
    finish_all(admission, ["a"])
    admission.take_batch()
    with pytest.raises(EventError, match="in training"):
        admission.dropped("a")


def test_a_checkpoint_with_another_bound_is_refused():
    with pytest.raises(UsageError, match="resume with the same"):
        Admission(1, 4).load_state(Admission(2, 4).state())
    with pytest.raises(UsageError, match="0 or more"):
        Admission(-1, 4)
