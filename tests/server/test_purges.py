"""A purge is answered when it is done, and one that cannot be done now is not forgotten."""

from __future__ import annotations

import asyncio
import itertools
import stat
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from learner.inbox import Inbox
from rlcore.curve import curve_client, curve_server, make_pair
from rlcore.engine.frontend import current_ticket
from rlcore.records.engine_link import RequestEnd
from rlcore.records.learner_link import Hello, LearnerMessage, Purge, PurgeCounts, Purged
from rlcore.transport import learner_endpoints
from server import purges as module
from server.access import Access, Gate
from server.app import connect
from server.keys import KeyEntry, TenantRules, digest_of
from server.learner_link import LearnerLink
from server.middleware import DraftAccount
from server.purges import EndClock, PurgeDelayed, Purges
from server.quotas import Quotas
from tests.e2e.tap import two_free_ports
from tests.server.asgi import http


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


def test_orders_of_several_tenants_at_the_same_time_are_all_remembered(tmp_path, monkeypatch):
    save = module._save

    def slow(path: Path, purges: list[Purge]) -> None:
        # The earlier an order, the longer the disk takes with what was open then.
        time.sleep(0.02 * (4 - len(purges)))
        save(path, purges)

    monkeypatch.setattr(module, "_save", slow)
    purges, _ = made(tmp_path, Learner(answers=False))

    async def run() -> None:
        orders = [purges.purge(name, deadline_s=0.3) for name in "abcd"]
        answers = await asyncio.gather(*orders, return_exceptions=True)
        assert [type(answer) for answer in answers] == [PurgeDelayed] * 4

    asyncio.run(run())
    again, _ = made(tmp_path, None)
    assert sorted(purge.tenant for purge in again.pending) == list("abcd")


def test_the_disk_never_holds_up_the_loop(tmp_path, monkeypatch):
    save, writers = module._save, []

    def noted(path: Path, purges: list[Purge]) -> None:
        writers.append(threading.current_thread())
        save(path, purges)

    monkeypatch.setattr(module, "_save", noted)
    purges, _ = made(tmp_path, Learner())
    asyncio.run(purges.purge("a"))
    assert len(writers) == 2
    assert threading.main_thread() not in writers


@pytest.mark.parametrize("learner", [True, False])
def test_what_was_under_way_at_a_purge_is_kept_out_and_what_comes_later_is_not(tmp_path, learner):
    purges, _ = made(tmp_path, Learner() if learner else None)
    before = time.monotonic()
    assert not purges.covers("a", before)
    asyncio.run(purges.purge("a"))
    assert purges.covers("a", before)
    assert not purges.covers("b", before)
    assert not purges.covers("a", time.monotonic())


def test_a_request_that_uploads_during_a_purge_ends_without_learning(tmp_path):
    """From its head to what the engine is told of its end; its body is read before it has a ticket."""
    purges, _ = made(tmp_path, Learner())
    llm, link = mock.Mock(), mock.Mock()
    connect(llm, mock.Mock(), mock.Mock(), link, purges)

    async def generate(scope: Any, receive: Any, send: Any) -> None:
        ticket = current_ticket.get()
        assert ticket is not None
        llm.on_end("r", 3, ticket)

    drafts, policy = mock.Mock(live=0), mock.Mock(live=0)
    app = Access(DraftAccount(generate, drafts, policy, mock.Mock()), _limited(), Quotas())

    async def asked(purged: bool) -> bool:
        async def receive() -> dict[str, Any]:
            if purged:
                await purges.purge("default")
            return {"type": "http.request", "body": b"{}", "more_body": False}

        await app(http("/v1/completions", "POST", authorization="Bearer k"), receive, mock.Mock())
        end: RequestEnd = link.send_end.call_args.args[0]
        return end.learn

    async def run() -> list[bool]:
        return [await asked(purged) for purged in (False, True, False)]

    assert asyncio.run(run()) == [True, False, True]


def _limited() -> Gate:
    """A quota of tokens has the body read first."""
    ring = mock.Mock()
    ring.rules.return_value = TenantRules(tokens_per_minute=1_000_000)
    ring.find.return_value = KeyEntry(sha256=digest_of("k"), role="tenant")
    return Gate(ring=ring)


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
    assert all(a < b for a, b in itertools.pairwise(told))
    assert all(now >= given for now, given in zip(told, times, strict=True))


def test_an_order_reaches_a_learner_over_the_link_and_its_answer_comes_back(tmp_path):
    """The server's link and the learner's inbox, with CURVE keys; the learner deletes in its own time."""
    for name in ("learner", "server"):
        make_pair(tmp_path / name)
    base = f"tcp://127.0.0.1:{two_free_ports()}"
    inbox = Inbox(base, curve_server(tmp_path / "learner", tmp_path / "server.pub"))
    ends = threading.Event()
    got: list[LearnerMessage] = []

    def learn() -> None:
        while not ends.is_set():
            inbox.wait(50)
            for server, message, _ in inbox.messages():
                got.append(message)
                if isinstance(message, Hello):
                    inbox.accept(server)
                elif isinstance(message, Purge):
                    inbox.tell(server, Purged(message.purge_id, PurgeCounts(journal_traces=7)))

    thread = threading.Thread(target=learn)
    thread.start()

    async def run() -> PurgeCounts:
        drafts, policy = mock.MagicMock(), mock.MagicMock()
        drafts.target_id, drafts.method, drafts.live = "t", "eagle3", 3
        drafts.next_version.return_value = 4
        drafts.manifest.return_value.sha256 = policy.sha256 = "0"
        policy.live = 0
        curve = curve_client(tmp_path / "server", tmp_path / "learner.pub")
        _, control = learner_endpoints(base)
        link = LearnerLink(control, drafts, policy, 3, curve, lambda: {"a": 0.25})
        task = asyncio.ensure_future(link.run())
        path = tmp_path / "open-purges.json"
        purges = Purges(path, link, lambda: False, lambda _: None, EndClock())
        try:
            return await purges.purge("a", deadline_s=20)
        finally:
            task.cancel()
            link.close()

    try:
        assert asyncio.run(run()) == PurgeCounts(journal_traces=7)
    finally:
        ends.set()
        thread.join(10)
        inbox.close()
    hellos = [message for message in got if isinstance(message, Hello)]
    assert hellos[0].replay_shares == {"a": 0.25}
