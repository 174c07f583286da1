"""A purge is answered when it is done, and one that cannot be done now is not forgotten."""

from __future__ import annotations

import asyncio
import stat
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlcore.records import Purge, PurgeCounts, Purged
from server import purges as module
from server.purges import EndClock, PurgeDelayed, Purges


class Learner:
    """Answers each order at once, unless it is away or its disk is full."""

    def __init__(self, answers: bool = True, error: str | None = None) -> None:
        self.on_purged: list[Callable[[Purged], None]] = []
        self.answers = answers
        self.error = error
        self.alive = True
        self.orders: list[Purge] = []

    def order(self, purge: Purge) -> None:
        self.orders.append(purge)
        if self.answers:
            answer = Purged(purge.purge_id, PurgeCounts(1, 2, 3, 4), self.error)
            asyncio.get_running_loop().call_soon(lambda: [f(answer) for f in self.on_purged])


def made(folder: Path, learner: Learner | None, kept: bool = False) -> tuple[Purges, list[str]]:
    forgotten: list[str] = []
    path = folder / "open-purges.json"
    return Purges(path, learner, lambda: kept, forgotten.append, EndClock()), forgotten


def test_a_purge_that_is_done_says_what_was_deleted_and_leaves_nothing_behind(tmp_path):
    learner = Learner()
    purges, forgotten = made(tmp_path, learner)
    assert asyncio.run(purges.purge("a")) == PurgeCounts(1, 2, 3, 4)
    assert forgotten == ["a"]
    assert purges.pending == []
    assert list(tmp_path.iterdir()) == []


def test_a_purge_without_an_answer_is_remembered_and_done_after_a_restart(tmp_path):
    purges, _ = made(tmp_path, Learner(answers=False))
    with pytest.raises(PurgeDelayed):
        asyncio.run(purges.purge("a", deadline_s=0.05))
    (path,) = tmp_path.iterdir()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    learner = Learner()
    again, _ = made(tmp_path, learner)
    assert [purge.tenant for purge in again.pending] == ["a"]

    async def run() -> None:
        task = asyncio.ensure_future(again.run())
        await asyncio.sleep(0.05)
        task.cancel()

    learner.alive = False
    asyncio.run(run())
    assert learner.orders == []
    learner.alive = True
    asyncio.run(run())
    assert again.pending == []
    assert list(tmp_path.iterdir()) == []


def test_a_learner_that_cannot_delete_is_asked_again(tmp_path):
    learner = Learner(error="no space left")
    purges, _ = made(tmp_path, learner)
    with pytest.raises(PurgeDelayed, match="no space left"):
        asyncio.run(purges.purge("a"))
    assert len(purges.pending) == 1
    learner.error = None
    assert asyncio.run(purges.purge("a")) == PurgeCounts(1, 2, 3, 4)
    assert purges.pending == []


def test_orders_for_one_tenant_at_the_same_time_are_all_answered(tmp_path):
    purges, _ = made(tmp_path, Learner())

    async def run() -> list[PurgeCounts]:
        return await asyncio.gather(*(purges.purge("a") for _ in range(5)))

    assert asyncio.run(run()) == [PurgeCounts(1, 2, 3, 4)] * 5


def test_without_a_learner_there_is_nothing_to_purge_unless_one_left_something(tmp_path):
    purges, _ = made(tmp_path, None)
    assert asyncio.run(purges.purge("a")) == PurgeCounts()
    purges, _ = made(tmp_path, None, kept=True)
    with pytest.raises(PurgeDelayed, match="without a learner"):
        asyncio.run(purges.purge("a"))
    assert len(purges.pending) == 1


def test_a_full_disk_does_not_keep_a_purge_from_being_done(tmp_path, monkeypatch):
    def full(path: Path, purges: list[Purge]) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(module, "_save", full)
    purges, _ = made(tmp_path, Learner())
    assert asyncio.run(purges.purge("a")) == PurgeCounts(1, 2, 3, 4)


@given(st.lists(st.floats(0, 1e10), min_size=1, max_size=30))
def test_the_clock_never_stands_still_or_goes_back(times):
    left = iter(times)
    clock = EndClock(lambda: next(left))
    told = [clock.now() for _ in times]
    assert all(a < b for a, b in zip(told, told[1:], strict=False))
    assert all(now >= given for now, given in zip(told, times, strict=True))
