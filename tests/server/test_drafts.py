"""Which draft is live: a state machine over swaps that work, fail, hang or never come back."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlcore.live_drafts import DraftError, LiveDraft
from rlcore.records.versions import DraftManifest
from rlcore.weights import WEIGHTS, WeightStore
from server import drafts as drafts_module
from server.drafts import KEPT_VERSIONS, Drafts, write_live

TARGET, METHOD = "target-1", "eagle3"


class Engine:
    """Stands for the engine: notes each swap, and answers as it is told to."""

    def __init__(self) -> None:
        self.swapped: list[int] = []
        self.refuse: str | None = None
        self.hang = False
        self.crash = False

    async def swap(self, folder: str, sha256: str, version: int, trained: bool) -> dict[str, Any]:
        assert Path(folder).name == f"{version:06d}"
        assert sha256
        await asyncio.sleep(3600 if self.hang else 0)
        if self.crash:
            raise RuntimeError("the engine is dead")
        if self.refuse:
            return {"error": "read back something else", "reason": self.refuse, "seconds": 0.2}
        self.swapped.append(version)
        return {"error": None, "reason": None, "seconds": 0.125}


def publish(store: WeightStore, version: int, rows: int = 3, **changes: Any) -> None:
    facts = {"method": METHOD, "target_id": TARGET} | changes
    manifest = DraftManifest(
        version=version, parent=None, sha256="", target_version=0, origin="learned", **facts
    )
    store.publish({"fc.weight": torch.full((rows, 2), float(version))}, {}, manifest)


def made(root: Path, versions: int = 4) -> tuple[Drafts, Engine]:
    """Versions 0 .. versions - 1, version 0 live."""
    store = WeightStore(root / "drafts")
    for version in range(versions):
        publish(store, version)
    write_live(store.root, LiveDraft(0))
    drafts, engine = Drafts.load(store, TARGET, METHOD), Engine()
    assert drafts is not None
    drafts.connect(engine.swap)
    return drafts, engine


def reloaded(drafts: Drafts) -> Drafts:
    again = Drafts.load(drafts.store, TARGET, METHOD)
    assert again is not None
    return again


def refused(drafts: Drafts, version: int, match: str) -> None:
    """The version is refused in these words, and nothing else changes."""
    before = (drafts.live, drafts.previous, drafts.statistics.count)
    with pytest.raises(DraftError, match=match):
        asyncio.run(drafts.activate(version))
    assert (drafts.live, drafts.previous, drafts.statistics.count) == before
    assert (reloaded(drafts).live, reloaded(drafts).previous) == before[:2]


def test_an_activated_version_is_live_and_still_is_after_a_restart(tmp_path):
    drafts, engine = made(tmp_path)
    changes = []
    drafts.on_change.append(lambda: changes.append(drafts.live))
    assert asyncio.run(drafts.activate(2)) == 0.125
    assert (drafts.live, drafts.previous, changes) == (2, 0, [2])
    assert engine.swapped == [2]
    assert (drafts.statistics.count, drafts.statistics.seconds_sum) == (1, 0.125)
    assert (reloaded(drafts).live, reloaded(drafts).previous) == (2, 0)
    assert drafts.next_version() == 4


def test_the_live_version_is_not_swapped_for_itself(tmp_path):
    drafts, engine = made(tmp_path)
    assert asyncio.run(drafts.activate(0)) == 0.0
    assert engine.swapped == []
    assert drafts.previous is None


def test_a_rollback_goes_back_and_a_second_one_forth(tmp_path):
    drafts, engine = made(tmp_path)
    with pytest.raises(DraftError, match="no previous"):
        asyncio.run(drafts.rollback())
    asyncio.run(drafts.activate(3))
    asyncio.run(drafts.rollback())
    assert (drafts.live, drafts.previous) == (0, 3)
    asyncio.run(drafts.rollback())
    assert (drafts.live, drafts.previous) == (3, 0)
    assert engine.swapped == [3, 0, 3]


def test_a_restart_can_still_roll_back(tmp_path):
    drafts, engine = made(tmp_path)
    asyncio.run(drafts.activate(2))
    again = reloaded(drafts)
    again.connect(engine.swap)
    asyncio.run(again.rollback())
    assert (again.live, again.previous) == (0, 2)


@pytest.mark.parametrize(
    ("changes", "reason", "words"),
    [
        ({"target_id": "other"}, "target", "trained for other"),
        ({"method": "draft_model"}, "method", "draft_model"),
        ({"rows": 5}, "shape", "fc.weight"),
    ],
)
def test_what_does_not_fit_is_refused_before_the_engine_sees_it(tmp_path, changes, reason, words):
    drafts, engine = made(tmp_path)
    publish(drafts.store, 7, **changes)
    refused(drafts, 7, words)
    assert drafts.statistics.failed == {reason: 1}
    assert engine.swapped == []


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "malformed"),
        (b"\xff" * 40, "truncated"),
        (b"\x05" + b"\0" * 7 + b"hello", "malformed"),
    ],
)
def test_a_file_that_is_no_weights_file_is_refused_before_the_engine_sees_it(
    tmp_path, content, reason
):
    drafts, engine = made(tmp_path)
    (drafts.store.folder(2) / WEIGHTS).write_bytes(content)
    refused(drafts, 2, "version 2 was refused")
    assert drafts.statistics.failed == {reason: 1}
    assert engine.swapped == []


def test_an_unknown_version_and_an_engine_that_is_not_up_are_refused(tmp_path):
    drafts, _ = made(tmp_path)
    refused(drafts, 99, "no version 99")
    assert drafts.statistics.failed == {"unknown_version": 1}
    refused(reloaded(drafts), 1, "not up yet")


def test_what_the_engine_refuses_is_counted_by_its_reason(tmp_path):
    drafts, engine = made(tmp_path)
    engine.refuse = "read_back"
    for _ in range(2):
        refused(drafts, 1, "read back something else")
    assert drafts.statistics.failed == {"read_back": 2}
    engine.refuse = None
    asyncio.run(drafts.activate(1))
    assert drafts.live == 1


def test_an_engine_that_does_not_answer_is_given_up_at_the_deadline(tmp_path, monkeypatch):
    monkeypatch.setattr(drafts_module, "SWAP_DEADLINE", 0.05)
    drafts, engine = made(tmp_path)
    engine.hang = True
    refused(drafts, 1, "did not answer")
    assert drafts.statistics.failed == {"deadline": 1}
    engine.hang = False
    asyncio.run(drafts.activate(1))
    assert drafts.live == 1


def test_a_swap_that_is_done_after_its_deadline_is_live_all_the_same(tmp_path, monkeypatch):
    monkeypatch.setattr(drafts_module, "SWAP_DEADLINE", 0.05)
    drafts, engine = made(tmp_path)
    told: list[int] = []
    drafts.on_change.append(lambda: told.append(drafts.live))

    async def run() -> None:
        answers = asyncio.Event()

        async def late(folder: str, sha256: str, version: int, rates: Any) -> dict[str, Any]:
            await answers.wait()
            return await engine.swap(folder, sha256, version, rates)

        drafts.connect(late)
        with pytest.raises(DraftError, match="did not answer"):
            await drafts.activate(1)
        with pytest.raises(DraftError, match="not answered the last swap"):
            await drafts.activate(2)
        assert (drafts.live, told) == (0, [])
        answers.set()
        await asyncio.sleep(0.02)
        assert (drafts.live, drafts.previous, told, engine.swapped) == (1, 0, [1], [1])
        await drafts.activate(2)

    asyncio.run(run())
    assert [change.version for change in drafts.history.changes] == [1, 2]
    assert reloaded(drafts).live == 2


def test_what_a_dead_engine_swapped_is_not_live(tmp_path):
    drafts, engine = made(tmp_path)

    async def dies(folder: str, sha256: str, version: int, rates: Any) -> dict[str, Any]:
        drafts.disconnect()
        return await engine.swap(folder, sha256, version, rates)

    drafts.connect(dies)
    refused(drafts, 1, "died after it swapped")


def test_a_dead_engine_changes_nothing_and_leaves_no_lock(tmp_path):
    drafts, engine = made(tmp_path)
    engine.crash = True
    refused(drafts, 1, "dead")
    assert drafts.statistics.failed == {"engine": 1}
    engine.crash = False
    asyncio.run(drafts.activate(1))


def test_swaps_never_overlap(tmp_path):
    drafts, engine = made(tmp_path)
    running, most = 0, 0

    async def slow(folder: str, sha256: str, version: int, trained: bool) -> dict[str, Any]:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0.01)
        running -= 1
        return await engine.swap(folder, sha256, version, trained)

    async def all_at_once() -> None:
        drafts.connect(slow)
        await asyncio.gather(*(drafts.activate(v) for v in (1, 2, 3, 1)))

    asyncio.run(all_at_once())
    assert most == 1
    assert engine.swapped == [1, 2, 3, 1]
    assert (drafts.live, drafts.previous) == (1, 3)


def test_old_versions_go_but_not_the_live_the_previous_or_the_first(tmp_path):
    drafts, _ = made(tmp_path, versions=3 * KEPT_VERSIONS)
    asyncio.run(drafts.activate(2))
    last = 3 * KEPT_VERSIONS - 1
    asyncio.run(drafts.activate(last))
    versions = drafts.store.versions()
    assert (drafts.live, drafts.previous) == (last, 2)
    assert versions[-KEPT_VERSIONS:] == list(range(2 * KEPT_VERSIONS, 3 * KEPT_VERSIONS))
    assert versions[:-KEPT_VERSIONS] == [0, 2]


def test_an_old_version_that_is_damaged_makes_no_swap_look_failed(tmp_path):
    drafts, _ = made(tmp_path, versions=KEPT_VERSIONS + 4)
    (drafts.store.folder(1) / "manifest.json").write_text("{")
    told: list[int] = []
    drafts.on_change.append(lambda: told.append(drafts.live))
    assert asyncio.run(drafts.activate(KEPT_VERSIONS + 3)) == 0.125
    assert told == [KEPT_VERSIONS + 3]
    assert drafts.store.versions()[:2] == [0, 1]
    assert 2 not in drafts.store.versions()


@pytest.mark.parametrize("content", ["", "[]", "{", '{"live": 0, "more": 1}', '{"live": "x"}'])
def test_a_damaged_record_is_an_error_that_says_what_to_do(tmp_path, content):
    drafts, _ = made(tmp_path)
    (drafts.store.root / "live.json").write_text(content)
    with pytest.raises(DraftError, match="delete it to start anew"):
        Drafts.load(drafts.store, TARGET, METHOD)


def test_nothing_was_ever_live_or_it_is_gone(tmp_path):
    assert Drafts.load(WeightStore(tmp_path / "none"), TARGET, METHOD) is None
    drafts, _ = made(tmp_path)
    drafts.store.remove(0)
    assert Drafts.load(drafts.store, TARGET, METHOD) is None


@settings(max_examples=30)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(["activate", "rollback", "restart"]), st.integers(0, 5), st.booleans()
        ),
        max_size=12,
    )
)
def test_state_on_disk_in_memory_and_in_the_engine_never_part(tmp_path_factory, moves):
    drafts, engine = made(tmp_path_factory.mktemp("d"))
    in_engine = 0
    for kind, version, works in moves:
        engine.refuse = None if works else "reload"
        if kind == "restart":
            drafts = reloaded(drafts)
            drafts.connect(engine.swap)
        try:
            if kind == "activate":
                asyncio.run(drafts.activate(version))
            elif kind == "rollback":
                asyncio.run(drafts.rollback())
        except DraftError:
            pass
        in_engine = engine.swapped[-1] if engine.swapped else 0
        on_disk = json.loads((drafts.store.root / "live.json").read_text())
        assert drafts.live == on_disk["live"] == in_engine
        assert drafts.previous == on_disk["previous"]
        assert drafts.previous != drafts.live


def damage(store: WeightStore, version: int) -> None:
    path = store.folder(version) / WEIGHTS
    path.write_bytes(path.read_bytes()[:-1])


def test_an_engine_never_starts_with_a_damaged_version(tmp_path):
    drafts, _ = made(tmp_path)
    asyncio.run(drafts.activate(2))
    told: list[int] = []
    drafts.on_change.append(lambda: told.append(drafts.live))
    asyncio.run(drafts.fall_back())
    assert (drafts.live, told) == (2, [])
    damage(drafts.store, 2)
    asyncio.run(drafts.fall_back())
    assert (drafts.live, drafts.previous) == (0, None)  # what was live before it
    assert told == [0]
    assert reloaded(drafts).live == 0
    assert drafts.manifest().version == 0
    assert drafts.history.rolled_back().keys() == {2}
    damage(drafts.store, 0)
    asyncio.run(drafts.fall_back())
    assert drafts.live == 3
    for version in (1, 3):
        damage(drafts.store, version)
    with pytest.raises(DraftError, match=r"no draft version .* is whole; delete it"):
        asyncio.run(drafts.fall_back())


def test_without_an_engine_nothing_is_swapped(tmp_path):
    drafts, engine = made(tmp_path)
    drafts.disconnect()
    with pytest.raises(DraftError, match="not up"):
        asyncio.run(drafts.activate(1))
    drafts.connect(engine.swap)
    asyncio.run(drafts.activate(1))
    assert drafts.live == 1


def test_a_full_disk_costs_no_swap_but_what_a_restart_knows(tmp_path, monkeypatch):
    drafts, engine = made(tmp_path)

    def full(root: Path, state: LiveDraft) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(drafts_module, "write_live", full)
        asyncio.run(drafts.activate(1))
    assert (drafts.live, engine.swapped) == (1, [1])
    assert reloaded(drafts).live == 0
    asyncio.run(drafts.activate(2))
    assert (reloaded(drafts).live, reloaded(drafts).previous) == (2, 1)
