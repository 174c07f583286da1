"""A recording gives back every trace, or says in one line why it cannot."""

import json
import struct
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from learner.recording import LONGEST_HEADER, MAGIC, Recorder, Recording, RecordingError
from rlcore.records.wire import SCHEMA_VERSION, encode
from tests.learner.made_spans import message


def record(path: Path, rows: list[int]) -> list[list[bytes]]:
    messages = [message(number, count) for number, count in enumerate(rows)]
    recorder = Recorder(path, "target-a", "eagle3")
    for frames in messages:
        recorder.add(frames)
    recorder.close()
    return messages


@settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(rows=st.lists(st.integers(0, 40), max_size=8))
def test_what_was_recorded_comes_back_in_order(tmp_path_factory, rows):
    path = tmp_path_factory.mktemp("r") / "a.traces"
    messages = record(path, rows)
    recording = Recording(path)
    assert recording.header.target_id == "target-a"
    assert recording.records == len(messages)
    read = list(recording)
    assert [encode(trace) for trace, _ in read] == [frames[0] for frames in messages]
    assert [frames for _, frames in read] == [frames[1:] for frames in messages]


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(share=st.floats(0, 1, exclude_max=True))
def test_a_file_cut_off_anywhere_is_refused_and_read_up_to_there_if_asked(tmp_path_factory, share):
    path = tmp_path_factory.mktemp("r") / "a.traces"
    messages = record(path, [3, 0, 9, 1])
    content = path.read_bytes()
    header = len(MAGIC) + 4 + struct.unpack_from("<I", content, len(MAGIC))[0]
    keep = header + int(share * (len(content) - header))
    path.write_bytes(content[:keep])
    with pytest.raises(RecordingError, match="cut off"):
        Recording(path)
    read = [frames for _, frames in Recording(path, cut_ok=True)]
    assert read == [frames[1:] for frames in messages][: len(read)]
    sizes = [4 + 8 * len(m) + sum(map(len, m)) for m in messages]
    whole = sum(header + sum(sizes[: i + 1]) <= keep for i in range(len(sizes)))
    assert len(read) == whole


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(share=st.floats(0, 1, exclude_max=True), flip=st.integers(1, 255))
def test_no_changed_byte_goes_unnoticed(tmp_path_factory, share, flip):
    path = tmp_path_factory.mktemp("r") / "a.traces"
    record(path, [3, 5])
    content = bytearray(path.read_bytes())
    content[int(share * len(content))] ^= flip
    path.write_bytes(content)
    with pytest.raises(RecordingError):
        list(Recording(path))


def test_what_follows_the_end_mark_is_damage(tmp_path):
    record(tmp_path / "a", [2])
    with open(tmp_path / "a", "ab") as file:
        file.write(b"x")
    with pytest.raises(RecordingError, match="damaged"):
        Recording(tmp_path / "a")


def test_a_recording_of_an_older_schema_is_named_as_such(tmp_path):
    old = json.dumps({"schema": SCHEMA_VERSION - 1, "model": "x"}).encode()
    path = tmp_path / "a"
    path.write_bytes(MAGIC + struct.pack("<I", len(old)) + old)
    with pytest.raises(RecordingError, match=f"schema {SCHEMA_VERSION - 1}"):
        Recording(path)


def test_another_file_is_no_recording_and_a_huge_header_is_not_read(tmp_path):
    (tmp_path / "a").write_bytes(b"{}")
    with pytest.raises(RecordingError, match="no recording"):
        Recording(tmp_path / "a")
    (tmp_path / "b").write_bytes(MAGIC + struct.pack("<I", LONGEST_HEADER + 1))
    with pytest.raises(RecordingError, match="header"):
        Recording(tmp_path / "b")
    with pytest.raises(RecordingError, match="cannot read"):
        Recording(tmp_path / "none")


def test_another_targets_or_methods_recording_is_refused(tmp_path):
    record(tmp_path / "a", [2])
    recording = Recording(tmp_path / "a")
    recording.check("target-a", "eagle3")
    with pytest.raises(RecordingError, match="target-b"):
        recording.check("target-b", "eagle3")
    with pytest.raises(RecordingError, match="eagle3"):
        recording.check("target-a", "draft_model")


def test_a_recording_is_never_written_over(tmp_path):
    record(tmp_path / "a", [2])
    with pytest.raises(RecordingError, match="exists"):
        Recorder(tmp_path / "a", "target-a", "eagle3")


def test_a_recording_for_other_auxiliary_layers_is_refused(tmp_path):
    record(tmp_path / "a", [2])  # it has none
    recording = Recording(tmp_path / "a")
    recording.check_aux(0)
    with pytest.raises(RecordingError, match="reads 96"):
        recording.check_aux(96)
    record(tmp_path / "empty", [])
    Recording(tmp_path / "empty").check_aux(96)
