"""Recordings: the trace stream of a run in one file, to be learned from again.

A recording is a magic line, a header (JSON, its length before it), the trace messages as they came,
and an end mark with their number and a digest of everything before it. A file without its end mark
was cut off; it is refused unless the caller takes what is there.

    magic   b"PACELINE TRACES\\n"
    header  u32 length, JSON: schema, target_id, method, created
    record  u32 number of frames > 0, u64 length of each, their bytes
    end     u32 0, u64 number of records, 32 bytes blake2b
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import struct
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import msgspec

from learner.cutoffs import sync_folder
from learner.framing import owner_only, pack_frames, read_frames
from rlcore.errors import PacelineError
from rlcore.records.trace import VerifyTrace, decode_trace
from rlcore.records.wire import SCHEMA_VERSION, RecordError
from rlcore.transport import Frame

MAGIC = b"PACELINE TRACES\n"
LONGEST_HEADER = 64 * 1024
END = struct.pack("<I", 0)
TAIL = struct.Struct("<Q32s")
PIECE = 1 << 22
"""Bytes hashed at once."""


class RecordingError(PacelineError):
    """A recording that cannot be learned from."""


class RecordingHeader(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a recording's traces are of."""

    target_id: str
    method: str
    created: float
    schema: int = SCHEMA_VERSION


class Recorder:
    """Writes one recording. Raises RecordingError when the file exists, OSError when the disk fails.

    ``close`` writes the end mark; a process that dies before leaves a file that says it was cut off.
    """

    def __init__(self, path: Path, target_id: str, method: str) -> None:
        self.path = path
        self.records = 0
        self.bytes = 0
        self._digest = hashlib.blake2b(digest_size=32)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file: BinaryIO = open(path, "xb", opener=owner_only)  # noqa: SIM115
            fcntl.flock(self._file, fcntl.LOCK_EX)  # whoever deletes from it leaves that to us
        except FileExistsError:
            raise RecordingError(f"{path} exists; a recording is never written over") from None
        except OSError as error:
            raise RecordingError(f"cannot write {path}: {error.strerror}") from None
        header = msgspec.json.encode(RecordingHeader(target_id, method, time.time()))
        self._write(MAGIC + struct.pack("<I", len(header)) + header)

    def add(self, frames: Sequence[Frame]) -> None:
        """One trace message, header frame first."""
        for piece in pack_frames(frames):
            self._write(piece)
        self.records += 1

    def delete(self, unwanted: Callable[[VerifyTrace], bool]) -> int:
        """Delete what was recorded and fits this; how much, when it is off the disk. Raises OSError."""
        self._file.flush()
        copied = _copy_without(self.path, unwanted)
        if copied is None:
            return 0
        self._file.close()
        self._file, self._digest = copied.file, copied.digest
        self.records, self.bytes = copied.records, copied.bytes
        return copied.deleted

    def close(self) -> None:
        self._write(END)
        self._file.write(TAIL.pack(self.records, self._digest.digest()))
        self._file.close()

    def _write(self, piece: Frame) -> None:
        self._file.write(piece)
        self._digest.update(piece)
        self.bytes += len(piece)


@dataclass
class _Copy:
    """A recording that has taken the place of another; open for more, its end mark not written."""

    file: BinaryIO
    digest: hashlib.blake2b
    records: int = 0
    bytes: int = 0
    deleted: int = 0
    whole: bool = False
    """Whether the other one had its end mark."""

    def write(self, piece: Frame) -> None:
        self.file.write(piece)
        self.digest.update(piece)
        self.bytes += len(piece)


def delete_from(path: Path, unwanted: Callable[[VerifyTrace], bool]) -> int:
    """Delete from a recording at rest; how many traces, when they are off the disk.

    One that is being written is left to its recorder. Raises OSError, or RecordingError for a file that
    is none.
    """
    with open(path, "rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return 0
        copied = _copy_without(path, unwanted)
    if copied is None:
        return 0
    with copied.file as file:
        if copied.whole:
            copied.write(END)
            file.write(TAIL.pack(copied.records, copied.digest.digest()))
            file.flush()
            os.fsync(file.fileno())
    return copied.deleted


def _copy_without(path: Path, unwanted: Callable[[VerifyTrace], bool]) -> _Copy | None:
    """Put a copy without those traces in the file's place; None when there are none."""
    if not any(unwanted(trace) for trace in traces_of(path)):
        return None
    partial = path.with_name(f".{path.name}.partial")
    partial.unlink(missing_ok=True)
    target: BinaryIO = open(partial, "xb", opener=owner_only)  # noqa: SIM115
    fcntl.flock(target, fcntl.LOCK_EX)
    copy = _Copy(target, hashlib.blake2b(digest_size=32))
    with open(path, "rb") as source:
        _read_header(path, source)
        first = source.tell()
        source.seek(0)
        copy.write(source.read(first))
        while not copy.whole:
            at = source.tell()
            copy.whole = source.read(4) == END
            source.seek(at)
            frames = None if copy.whole else read_frames(source)
            if frames is None:
                break
            if unwanted(decode_trace(frames)):
                copy.deleted += 1
                continue
            for piece in pack_frames(frames):
                copy.write(piece)
            copy.records += 1
    target.flush()
    os.fsync(target.fileno())
    os.replace(partial, path)
    sync_folder(path.parent)
    return copy


def traces_of(path: Path) -> Iterator[VerifyTrace]:
    """The headers of a recording that need not be whole. Raises OSError, RecordingError, RecordError."""
    with open(path, "rb") as file:
        _read_header(path, file)
        while (frames := read_frames(file)) is not None:
            yield decode_trace(frames)


class Recording:
    """A whole recording, verified from end to end before the first trace is given out."""

    def __init__(self, path: Path, *, cut_ok: bool = False) -> None:
        """``cut_ok`` takes a file that was cut off, up to its last whole trace. Raises RecordingError."""
        self.path = path
        try:
            with open(path, "rb") as file:
                self.header = _read_header(path, file)
                self._first = file.tell()
                self.records, whole = _verify(path, file)
        except OSError as error:
            raise RecordingError(f"cannot read {path}: {error.strerror}") from None
        if not whole and not cut_ok:
            raise RecordingError(
                f"{path} was cut off after {self.records} traces; record it again, "
                "or give --cut-ok to learn from what is there"
            )

    def __iter__(self) -> Iterator[tuple[VerifyTrace, list[bytes]]]:
        """(header, tensor frames) of every trace; raises RecordingError on one that is malformed."""
        with open(self.path, "rb") as file:
            file.seek(self._first)
            for number in range(self.records):
                frames = read_frames(file)
                try:
                    if frames is None:
                        raise RecordError("changed", "the file changed while it was read")
                    yield decode_trace(frames), frames[1:]
                except RecordError as error:
                    raise RecordingError(f"{self.path}, trace {number}: {error}") from None

    def check(self, target_id: str, method: str) -> None:
        """Raises RecordingError unless it was recorded of this target, for this type of drafter."""
        if self.header.target_id != target_id:
            raise RecordingError(
                f"{self.path} was recorded of {self.header.target_id}, not of {target_id}; "
                "give the matching --target"
            )
        if self.header.method != method:
            raise RecordingError(
                f"{self.path} was recorded for a {self.header.method} drafter; "
                f"give --method {self.header.method}"
            )

    def check_aux(self, width: int) -> None:
        """Raises RecordingError unless its traces have auxiliary states so wide; 0: they need none."""
        for trace, _ in self:
            found = next((spec.shape[1] for spec in trace.tensors if spec.name == "aux"), 0)
            if width and found != width:
                raise RecordingError(
                    f"{self.path} has auxiliary states {found} wide, the drafter reads {width}: "
                    "it was recorded with a drafter that reads other layers; start from that one"
                )
            return


def _read_header(path: Path, file: BinaryIO) -> RecordingHeader:
    if file.read(len(MAGIC)) != MAGIC:
        raise RecordingError(f"{path} is no recording of traces; make one with 'paceline record'")
    size = file.read(4)
    length = struct.unpack("<I", size)[0] if len(size) == 4 else 0
    if not 0 < length <= LONGEST_HEADER:
        raise RecordingError(f"{path}: its header is damaged")
    content = file.read(length)
    try:
        schema = msgspec.json.decode(content, type=dict).get("schema")
        if schema != SCHEMA_VERSION:
            raise RecordingError(
                f"{path} has schema {schema}, this version reads {SCHEMA_VERSION}; record it again"
            )
        return msgspec.json.decode(content, type=RecordingHeader)
    except msgspec.DecodeError as error:
        raise RecordingError(f"{path}: its header is damaged ({error})") from None


def _verify(path: Path, file: BinaryIO) -> tuple[int, bool]:
    """(whole records, whether the end mark is there and right)."""
    records = 0
    while True:
        at = file.tell()
        if file.read(4) == END:
            break
        file.seek(at)
        if read_frames(file, skip=True) is None:
            return records, False
        records += 1
    end = file.tell()
    tail = file.read(TAIL.size)
    if len(tail) < TAIL.size:
        return records, False
    count, digest = TAIL.unpack(tail)
    if count != records or digest != _digest(path, end) or file.read(1):
        raise RecordingError(f"{path} is damaged: it is not what was recorded; record it again")
    return records, True


def _digest(path: Path, end: int) -> bytes:
    """Of the file's first ``end`` bytes."""
    digest = hashlib.blake2b(digest_size=32)
    with open(path, "rb") as file:
        while end > 0 and (piece := file.read(min(PIECE, end))):
            digest.update(piece)
            end -= len(piece)
    return digest.digest()
