"""The history tells what was live when and why, over restarts and damage."""

import os

import msgspec
import pytest

from server.history import FILE, KEPT_CHANGES, Change, History


def test_changes_come_back_after_a_restart(tmp_path):
    history = History(tmp_path)
    history.add(1, 0, "promoted", "better")
    history.add(0, 1, "rolled_back", "worse on live traffic")
    history.add(2, 0, "chosen")
    again = History(tmp_path)
    assert list(again.changes) == list(history.changes)
    assert again.rolled_back() == {1: "worse on live traffic"}
    assert [change.before for change in again.rollbacks()] == [1]


def test_a_damaged_line_costs_that_line_only(tmp_path):
    history = History(tmp_path)
    history.add(1, 0, "promoted")
    with open(tmp_path / FILE, "ab") as file:
        file.write(b"\xff{half a li\n")
    history.add(2, 1, "promoted")
    assert [change.version for change in History(tmp_path).changes] == [1, 2]


def test_the_file_is_cut_at_a_restart(tmp_path):
    line = msgspec.json.encode(Change(0.0, 1, 0, "promoted")) + b"\n"
    (tmp_path / FILE).write_bytes(line * (KEPT_CHANGES + 50))
    assert len(History(tmp_path).changes) == KEPT_CHANGES
    assert len((tmp_path / FILE).read_bytes().splitlines()) == KEPT_CHANGES


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_a_full_disk_costs_the_history_not_the_swap(tmp_path):
    history = History(tmp_path)
    (tmp_path / FILE).symlink_to("/dev/full")
    history.add(1, 0, "promoted")
    assert [change.version for change in history.changes] == [1]
