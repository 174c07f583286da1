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

    @initialize(
        steps=st.integers(0, 3),
        batch=st.integers(1, 3),
        version=st.integers(0, 2),
        updates=st.integers(1, 3),
    )
    def start(self, steps: int, batch: int, version: int, updates: int) -> None:
        self.steps, self.batch, self.updates = steps + updates - 1, batch, updates
        self.admission = Admission(self.steps, batch, version, updates)
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
        updates = data.draw(st.integers(0, self.updates))
        groups = data.draw(st.lists(st.sampled_from(self.taken), unique=True)) if updates else []
        before = {name: data.draw(st.integers(0, updates - 1)) for name in groups}
        self.admission.trained(before, updates)
        for name, earlier in before.items():
            self.staleness += [self.version + earlier - version for version in self.finished[name]]
        for name in self.taken:
            del self.finished[name]
        self.taken = ()
        self.version += updates

    @rule(data=st.data())
    def publish(self, data: st.DataObject) -> None:
        self.published = data.draw(st.integers(self.published, self.version))
        self.admission.published(self.published)

    def like(self) -> Admission:
        return Admission(self.steps, self.batch, updates_per_batch=self.updates)

    @rule()
    def kill(self) -> None:
        saved = json.loads(json.dumps(self.admission.state()))
        self.admission = self.like()
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
        trial = self.like()
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
        trial = self.like()
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


def train(admission: Admission, *names: str) -> None:
    """By one update."""
    admission.trained(dict.fromkeys(names, 0), 1)


def test_without_off_policy_steps_a_batch_is_of_the_version_that_is_trained():
    admission = Admission(0, 2)
    assert admission.capacity == 2
    finish_all(admission, ["a", "b"])
    assert admission.capacity == 0
    assert admission.take_batch() == ("a", "b")
    train(admission, "a", "b")
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
        train(admission, name)
        admission.published(version + 1)
    finish_all(admission, ["c"], 2)
    assert admission.take_batch() == ()
    assert admission.blocking() == ("long",)
    admission.finished("long", [0])
    assert admission.take_batch() == ("long",)
    train(admission, "long")
    assert admission.histogram == [2 * GROUP_SIZE, 0, 1]


def test_groups_filtered_out_of_updates_neither_stop_admission_nor_open_it_too_far():
    admission = Admission(1, 2)
    for version in range(20):
        finish_all(admission, [f"{version}-{i}" for i in range(admission.capacity)], version)
        admission.dropped(admission.waiting[-1])  # equal rewards
        batch = admission.take_batch()
        train(admission, *batch[:1])  # and one more found in the batch
        admission.published(version + 1)
        assert 0 < admission.capacity <= 4 - len(admission.waiting)
    assert admission.version == 20


def test_a_batch_with_nothing_to_learn_from_is_no_update():
    admission = Admission(0, 1)
    finish_all(admission, ["a"])
    admission.take_batch()
    admission.trained({}, 0)
    assert (admission.version, admission.capacity, admission.histogram) == (0, 1, [0])


def test_tokens_of_a_newer_version_than_at_admission_count_as_that():
    admission = Admission(1, 1)
    finish_all(admission, ["a"])
    admission.admit("b")
    admission.take_batch()
    train(admission, "a")
    admission.published(1)
    admission.finished("b", [1, 1])  # it had not begun when version 1 came
    assert admission.take_batch() == ("b",)
    train(admission, "b")
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
        (lambda a: a.trained({"f": 0}, 1), "not in the batch"),
        (lambda a: a.trained({}, 2), "1 are the most"),
        (lambda a: a.trained({}, -1), "-1 updates"),
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


def test_the_bound_is_of_optimizer_updates_however_many_a_batch_is_good_for():
    admission = Admission(3, 2, updates_per_batch=2)
    assert admission.capacity == 4  # trained at once, and after one batch: 1 and 3 updates off
    finish_all(admission, ["a", "b", "c", "d"])
    assert admission.take_batch() == ("a", "b")
    admission.trained({"a": 0, "b": 1}, 2)
    assert admission.version == 2
    assert admission.capacity == 0  # the engines still sample with version 0
    admission.published(2)
    assert admission.capacity == 2
    assert admission.take_batch() == ("c", "d")
    admission.trained({"c": 0, "d": 1}, 2)
    assert admission.histogram == [GROUP_SIZE] * 4


def test_a_long_group_is_waited_for_in_time_where_batches_are_good_for_several_updates():
    admission = Admission(3, 1, updates_per_batch=2)
    admission.admit("long")
    finish_all(admission, ["a"])
    assert admission.take_batch() == ("a",)
    admission.trained({"a": 0}, 2)
    admission.published(2)
    finish_all(admission, ["b"], 2)
    assert admission.take_batch() == ()  # after it "long" would be 4 or 5 updates off
    assert admission.blocking() == ("long",)


def test_a_bound_that_the_updates_on_a_fresh_batch_exceed_is_refused():
    assert Admission(2, 1, updates_per_batch=3).capacity == 1
    with pytest.raises(UsageError, match="3 updates on a batch is 2 off policy"):
        Admission(1, 1, updates_per_batch=3)


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
