"""The replay on disk: every accepted trace message, as it came, in bounded segment files.

A segment is a run of records; a record is a little-endian count of frames, their lengths, and their
bytes. What a crash left half-written at the end of a segment is cut off when it is read.
"""

from __future__ import annotations

import contextlib
import struct
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import BinaryIO

from rlcore.records import RecordError, VerifyTrace, decode_trace
from rlcore.transport import MAX_FRAME_BYTES

SEGMENT_BYTES = 64 * 1024 * 1024

MAX_FRAMES = 8


class Journal:
    """Append-only; the oldest segments go when the budget is exceeded."""

    def __init__(self, root: Path, max_bytes: int) -> None:
        self._root = root
        self._max_bytes = max_bytes
        root.mkdir(parents=True, exist_ok=True)
        segments = self.segments()
        self._next = int(segments[-1].stem) + 1 if segments else 0
        self._file: BinaryIO | None = None
        self._written = 0

    def segments(self) -> list[Path]:
        return sorted(self._root.glob("*.traces"))

    def append(self, frames: Sequence[bytes | memoryview]) -> None:
        """Raises OSError when the disk cannot take it."""
        if self._file is None or self._written > SEGMENT_BYTES:
            self._roll()
        assert self._file is not None
        lengths = [len(frame) for frame in frames]
        try:
            self._file.write(struct.pack(f"<I{len(lengths)}Q", len(lengths), *lengths))
            for frame in frames:
                self._file.write(frame)
            self._file.flush()
        except OSError:
            # Nothing may follow a torn record: the next append begins a new segment.
            torn, self._file = self._file, None
            with contextlib.suppress(OSError):
                torn.close()
            raise
        self._written += sum(lengths)

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def _roll(self) -> None:
        self.close()
        self._file = open(self._root / f"{self._next:08d}.traces", "wb")  # noqa: SIM115
        self._next += 1
        self._written = 0
        segments = self.segments()
        total = sum(segment.stat().st_size for segment in segments)
        for segment in segments[:-1]:
            if total <= self._max_bytes:
                break
            total -= segment.stat().st_size
            segment.unlink()

    def read(self) -> Iterator[tuple[VerifyTrace, list[bytes]]]:
        """Every whole record, oldest first: (header, tensor frames)."""
        for segment in self.segments():
            with open(segment, "rb") as file:
                while (frames := _read_record(file)) is not None:
                    with contextlib.suppress(RecordError):
                        yield decode_trace(frames), frames[1:]


def _read_record(file: BinaryIO) -> list[bytes] | None:
    head = file.read(4)
    if len(head) < 4:
        return None
    (count,) = struct.unpack("<I", head)
    if not 0 < count <= MAX_FRAMES:
        return None
    table = file.read(8 * count)
    if len(table) < 8 * count:
        return None
    frames = []
    for length in struct.unpack(f"<{count}Q", table):
        if length > MAX_FRAME_BYTES:
            return None
        frame = file.read(length)
        if len(frame) < length:
            return None
        frames.append(frame)
    return frames
