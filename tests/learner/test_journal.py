"""The journal gives back what was written, up to where a crash cut it, within its budget."""

import shutil
import tempfile
from pathlib import Path
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import learner.journal as journal_module
from learner.journal import Journal
from tests.learner.made_spans import message


def write(root: Path, messages: list[list[bytes]], max_bytes: int = 10**9) -> None:
    journal = Journal(root, max_bytes)
    for frames in messages:
        journal.append(frames)
    journal.close()


def names(root: Path) -> list[str]:
    return [trace.request_id for trace, _ in Journal(root, 10**9).read()]


@pytest.fixture(scope="module")
def folder():
    path = Path(tempfile.mkdtemp())
    yield path
    shutil.rmtree(path)


@settings(deadline=None, max_examples=40)
@given(st.lists(st.integers(1, 20), max_size=12))
def test_what_is_written_is_read_in_order(folder, rows):
    root = Path(tempfile.mkdtemp(dir=folder))
    messages = [message(i, n) for i, n in enumerate(rows)]
    write(root, messages)
    read = list(Journal(root, 10**9).read())
    assert [trace.request_id for trace, _ in read] == [f"r{i}" for i in range(len(rows))]
    assert [frames for _, frames in read] == [frames[1:] for frames in messages]


@settings(deadline=None, max_examples=80)
@given(st.lists(st.integers(1, 6), min_size=1, max_size=6), st.data())
def test_a_segment_cut_at_any_byte_is_read_up_to_the_cut(folder, rows, data):
    root = Path(tempfile.mkdtemp(dir=folder))
    messages = [message(i, n) for i, n in enumerate(rows)]
    write(root, messages)
    (segment,) = Journal(root, 10**9).segments()
    sizes = [4 + sum(8 + len(frame) for frame in frames) for frames in messages]
    content = segment.read_bytes()
    assert len(content) == sum(sizes)
    cut = data.draw(st.integers(0, len(content)))
    segment.write_bytes(content[:cut])
    whole = sum(sum(sizes[: i + 1]) <= cut for i in range(len(sizes)))
    assert names(root) == [f"r{i}" for i in range(whole)]
    # A restarted learner writes on, into a new segment; nothing read before is lost.
    write(root, [message(99, 2)])
    assert names(root) == [*(f"r{i}" for i in range(whole)), "r99"]


@settings(deadline=None, max_examples=60)
@given(st.binary(min_size=1, max_size=200))
def test_garbage_in_a_segment_is_never_fatal(folder, garbage):
    root = Path(tempfile.mkdtemp(dir=folder))
    write(root, [message(1, 3)])
    (segment,) = Journal(root, 10**9).segments()
    segment.write_bytes(segment.read_bytes() + garbage)
    assert names(root)[0] == "r1"


@settings(deadline=None, max_examples=40)
@given(st.lists(st.integers(1, 40), min_size=1, max_size=40), st.integers(200, 4000))
def test_the_budget_holds_but_for_the_segment_in_writing(folder, rows, budget):
    root = Path(tempfile.mkdtemp(dir=folder))
    segment_bytes = 600
    messages = [message(i, n) for i, n in enumerate(rows)]
    with mock.patch.object(journal_module, "SEGMENT_BYTES", segment_bytes):
        write(root, messages, max_bytes=budget)
    used = sum(s.stat().st_size for s in Journal(root, budget).segments())
    largest = max(4 + sum(8 + len(f) for f in frames) for frames in messages)
    assert used <= budget + segment_bytes + 2 * largest
    kept = names(root)
    assert kept == [f"r{i}" for i in range(len(rows))][-len(kept) :]


def test_a_full_disk_is_an_os_error_and_nothing_follows_the_torn_record(tmp_path):
    journal = Journal(tmp_path, 10**9)
    journal.append(message(0, 4))
    segment = journal.segments()[0]
    whole = segment.read_bytes()
    with open("/dev/full", "wb") as full:
        kept, journal._file = journal._file, full
        with pytest.raises(OSError, match="No space left"):
            journal.append(message(1, 4))
    kept.close()
    segment.write_bytes(whole + whole[:7])  # what the disk took of it
    journal.append(message(2, 4))
    journal.close()
    assert len(journal.segments()) == 2
    assert names(tmp_path) == ["r0", "r2"]


@settings(deadline=None, max_examples=40)
@given(
    st.lists(st.tuples(st.integers(1, 40), st.booleans()), min_size=1, max_size=60),
    st.integers(3000, 9000),
)
def test_what_is_wanted_outlives_its_segment_within_the_budget(folder, what, budget):
    root = Path(tempfile.mkdtemp(dir=folder))
    segment_bytes, messages = 600, [message(i, n) for i, (n, _) in enumerate(what)]
    sizes = [4 + sum(8 + len(f) for f in frames) for frames in messages]
    # Only the newest of the wanted ones that fit into half the budget are.
    wanted: set[str] = set()
    room = budget // 2
    for i in reversed(range(len(what))):
        if what[i][1] and sizes[i] <= room:
            wanted.add(f"r{i}")
            room -= sizes[i]
    with mock.patch.object(journal_module, "SEGMENT_BYTES", segment_bytes):
        journal = Journal(root, budget, lambda trace: trace.request_id in wanted)
        for frames in messages:
            journal.append(frames)
        journal.close()
    kept = names(root)
    assert wanted <= set(kept)
    assert len(kept) == len(set(kept))
    used = sum(s.stat().st_size for s in Journal(root, budget).segments())
    assert used <= budget + segment_bytes + 2 * max(sizes)


@settings(deadline=None, max_examples=40)
@given(st.lists(st.integers(1, 40), min_size=1, max_size=30), st.integers(0, 29), st.booleans())
def test_marks_tell_before_from_after_across_segments_and_restarts(folder, rows, cut, restart):
    root = Path(tempfile.mkdtemp(dir=folder))
    with mock.patch.object(journal_module, "SEGMENT_BYTES", 600):
        journal = Journal(root, 10**9)
        end = journal.end
        for i, n in enumerate(rows):
            if i == min(cut, len(rows) - 1):
                end = journal.end
                if restart:
                    journal.close()
                    journal = Journal(root, 10**9)
            journal.append(message(i, n))
        journal.close()
    after = [trace.request_id for mark, trace, _ in journal.read_marked() if mark >= end]
    assert after == [f"r{i}" for i in range(min(cut, len(rows) - 1), len(rows))]


def test_a_disk_that_fills_up_while_the_wanted_are_copied_loses_none_of_them(tmp_path):
    with mock.patch.object(journal_module, "SEGMENT_BYTES", 600):
        journal = Journal(tmp_path, 2000, lambda trace: trace.request_id in {"r0", "r1"})
        for i in range(8):
            journal.append(message(i, 20))
        real = Journal._write
        calls = []

        def full(self, frames):
            calls.append(len(frames))
            if len(calls) % 3 == 0:
                raise OSError(28, "No space left on device")
            real(self, frames)

        failed = 0
        with mock.patch.object(Journal, "_write", full):
            for i in range(8, 40):
                try:
                    journal.append(message(i, 20))
                except OSError:
                    failed += 1
        journal.close()
    assert failed > 3
    kept = names(tmp_path)
    assert {"r0", "r1"} <= set(kept)
    assert len(kept) == len(set(kept))


def torn_write(journal: Journal, frames: list[bytes]) -> None:
    """The disk takes a part of the message."""
    assert journal._file is not None
    journal._file.write(frames[0])
    journal._file.flush()
    raise OSError(28, "No space left on device")


def test_failed_writes_leave_no_files_and_no_torn_messages_behind(tmp_path):
    journal = Journal(tmp_path, 10**9)
    journal.append(message(0, 4))
    (first,) = journal.segments()
    whole = first.read_bytes()
    for i in range(1, 9):
        with (
            mock.patch.object(Journal, "_write", torn_write),
            pytest.raises(OSError, match="No space left"),
        ):
            journal.append(message(i, 4))
        assert journal.segments() == [first]
        assert first.read_bytes() == whole
    journal.append(message(9, 4))
    journal.close()
    assert names(tmp_path) == ["r0", "r9"]


def test_marks_grow_when_a_write_fails_after_all_older_segments_went(tmp_path):
    with mock.patch.object(journal_module, "SEGMENT_BYTES", 600):
        journal = Journal(tmp_path, 0)
        for i in range(3):
            journal.append(message(i, 40))
        end = journal.end
        with (
            mock.patch.object(Journal, "_write", torn_write),
            pytest.raises(OSError, match="No space left"),
        ):
            journal.append(message(3, 40))
        assert journal.end >= end
        again = Journal(tmp_path, 0)
        again.append(message(4, 40))
        again.close()
    assert [trace.request_id for mark, trace, _ in again.read_marked() if mark >= end] == ["r4"]
