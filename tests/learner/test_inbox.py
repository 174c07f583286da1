"""Whom the learner speaks to."""

from __future__ import annotations

from pathlib import Path

import pytest

from learner import inbox as module
from learner.inbox import Inbox
from rlcore.records.learner_link import FetchDraft


def test_servers_that_say_hello_no_more_are_forgotten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    clock = [0.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: clock[0])
    inbox = Inbox(f"ipc://{tmp_path}/learner")
    told: list[bytes] = []
    monkeypatch.setattr(inbox, "tell", lambda server, message: told.append(server))
    try:
        for number in range(100):
            inbox.accept(b"stays")
            inbox.accept(b"connection %d" % number)
            clock[0] += module.REMEMBERED_FOR / 10
        inbox.accept(b"stays")
        inbox.tell_all(FetchDraft(1))
    finally:
        inbox.close()
    assert b"stays" in told
    assert b"connection 99" in told
    assert len(told) < 15
