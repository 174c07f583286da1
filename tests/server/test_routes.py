"""Our own routes, over a socket and without an engine."""

from __future__ import annotations

from pathlib import Path

import httpx

from rlcore.weights import MANIFEST
from tests.server.stand_in import StandIn


def test_a_damaged_version_does_not_hide_the_others(tmp_path: Path):
    with StandIn(tmp_path, learner=False) as server:
        (server.drafts.store.folder(2) / MANIFEST).write_text("{")
        answer = httpx.get(f"{server.url}/v1/paceline/drafts")
    assert answer.status_code == 200
    listed = answer.json()
    assert [draft["version"] for draft in listed["drafts"]] == [0, 1, 3, 4, 5]
    (damaged,) = listed["damaged"]
    assert damaged["version"] == 2
    assert "manifest of version 2" in damaged["error"]
