"""The history tells what was live when and why, over restarts and damage."""

import os
from pathlib import Path

import msgspec
import pytest
from structlog.testing import capture_logs

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


def test_nothing_is_glued_to_a_line_that_a_crash_tore(tmp_path):
    History(tmp_path).add(1, 0, "promoted")
    file = tmp_path / FILE
    file.write_bytes(file.read_bytes() + b'{"time":1.0,"vers')
    again = History(tmp_path)
    assert [change.version for change in again.changes] == [1]
    again.add(2, 1, "promoted")
    again.add(3, 2, "promoted")
    assert [change.version for change in History(tmp_path).changes] == [1, 2, 3]


def test_a_whole_last_line_without_its_end_is_kept(tmp_path):
    History(tmp_path).add(1, 0, "promoted")
    file = tmp_path / FILE
    file.write_bytes(file.read_bytes().rstrip())
    again = History(tmp_path)
    again.add(2, 1, "promoted")
    assert [change.version for change in History(tmp_path).changes] == [1, 2]


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_what_follows_a_failed_write_is_a_line_of_its_own(tmp_path):
    history = History(tmp_path)
    file = tmp_path / FILE
    file.symlink_to("/dev/full")
    history.add(1, 0, "promoted")
    file.unlink()
    file.write_bytes(b'{"time":1.0,"vers')  # what the disk took of it
    history.add(2, 1, "promoted")
    assert [change.version for change in History(tmp_path).changes] == [2]


def test_a_full_disk_at_the_start_is_one_line_and_the_history_is_there(tmp_path, monkeypatch):
    line = msgspec.json.encode(Change(0.0, 1, 0, "promoted")) + b"\n"
    (tmp_path / FILE).write_bytes(line * (KEPT_CHANGES + 50))

    def full(path, content):
        path.touch()
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    with capture_logs() as logged:
        history = History(tmp_path)
    assert len(history.changes) == KEPT_CHANGES
    assert [entry["reason"] for entry in logged] == ["No space left on device"]
    assert [path.name for path in tmp_path.iterdir()] == [FILE]
    assert len((tmp_path / FILE).read_bytes().splitlines()) == KEPT_CHANGES + 50
