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

import hashlib
import struct
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import BinaryIO

import msgspec

from learner.framing import pack_frames, read_frames
from rlcore.errors import PacelineError
from rlcore.records import SCHEMA_VERSION, RecordError, VerifyTrace, decode_trace
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
            self._file: BinaryIO = open(path, "xb")  # noqa: SIM115
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

    def close(self) -> None:
        self._write(END)
        self._file.write(TAIL.pack(self.records, self._digest.digest()))
        self._file.close()

    def _write(self, piece: Frame) -> None:
        self._file.write(piece)
        self._digest.update(piece)
        self.bytes += len(piece)


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
