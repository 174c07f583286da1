"""The replay on disk: every accepted trace message, as it came, in bounded segment files.

A segment is a run of messages (``learner.framing``). What a crash left half-written at the end of a
segment is cut off when it is read. When the oldest segment has to go, the messages in it that are
still wanted are written again at the end.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import BinaryIO

from learner.cutoffs import Oldest, sync_folder
from learner.framing import owner_only, pack_frames, read_frames
from rlcore.records.trace import VerifyTrace, decode_trace
from rlcore.records.wire import RecordError
from rlcore.transport import Frame

SEGMENT_BYTES = 64 * 1024 * 1024

Mark = tuple[int, int]
"""(segment, message in it); marks grow with time, across restarts."""


def _unwanted(trace: VerifyTrace) -> bool:
    return False


class Journal:
    """Append-only; the oldest segments go when the budget is exceeded.

    ``wanted`` says whether a message is to outlive its segment; what is wanted must stay well below
    the budget, which otherwise gives way.
    """

    def __init__(
        self, root: Path, max_bytes: int, wanted: Callable[[VerifyTrace], bool] = _unwanted
    ) -> None:
        self._root = root
        self._max_bytes = max_bytes
        self._wanted = wanted
        root.mkdir(parents=True, exist_ok=True, mode=0o700)
        for partial in root.glob("*.partial"):
            partial.unlink()  # a deletion that a crash cut short; it is done again
        segments = self.segments()
        self._next = int(segments[-1].stem) + 1 if segments else 0
        self._file: BinaryIO | None = None
        self._bytes = self._messages = 0
        self._oldest = Oldest()
        self._whole = 0
        """Bytes of the segment in writing that stay when a write fails."""

    def segments(self) -> list[Path]:
        return sorted(self._root.glob("*.traces"))

    @property
    def end(self) -> Mark:
        """Every message so far lies before it, every later one does not."""
        return (self._next, 0) if self._file is None else (self._next - 1, self._messages)

    def append(self, frames: Sequence[Frame]) -> None:
        """Raises OSError when the disk cannot take it; nothing of it is left behind then."""
        try:
            if self._file is None or self._bytes > SEGMENT_BYTES:
                self._roll()
            self._write(frames)
        except OSError:
            self._take_back()
            raise
        self._whole = self._bytes

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def _take_back(self) -> None:
        """Cut off what failed, and begin a new segment with the next message."""
        torn, self._file = self._file, None
        if torn is None:
            return
        with contextlib.suppress(OSError):
            torn.close()  # tries to write what it still holds
        segment = self._segment(self._next - 1)
        with contextlib.suppress(
            OSError
        ):  # a torn end that cannot be cut off is passed over in reading
            os.truncate(segment, self._whole)
            # Marks grow over restarts too, so the last number that was used stays on the disk.
            if self._whole == 0 and len(self.segments()) > 1:
                segment.unlink()
                self._next -= 1

    def _segment(self, number: int) -> Path:
        return self._root / f"{number:08d}.traces"

    def _write(self, frames: Sequence[Frame]) -> None:
        assert self._file is not None
        for piece in pack_frames(frames):
            self._file.write(piece)
            self._bytes += len(piece)
        self._file.flush()
        self._messages += 1

    def _roll(self) -> None:
        self.close()
        self._file = open(self._segment(self._next), "wb", opener=owner_only)  # noqa: SIM115
        self._next += 1
        self._bytes = self._messages = self._whole = 0
        segments = self.segments()[:-1]
        total = sum(segment.stat().st_size for segment in segments)
        for segment in segments:
            if total + self._bytes <= self._max_bytes:
                break
            for _, trace, frames in _messages(segment):
                if self._wanted(trace):
                    self._write(frames)
            total -= segment.stat().st_size
            segment.unlink()
            self._whole = self._bytes  # what was copied is nowhere else now

    def delete(self, unwanted: Callable[[VerifyTrace], bool]) -> int:
        """Delete the messages for which this holds; how many there were, when they are off the disk.

        Raises OSError; then some may be left. What stays keeps its mark.
        """
        self.close()
        segments = self.segments()
        return sum(_delete(s, unwanted, last=s == segments[-1]) for s in segments)

    def expire(self, before: float) -> int:
        """Delete what ended before then; how many messages, when they are off the disk. Raises OSError."""
        deleted = 0
        for segment in self.segments():
            if not self._oldest.may_be(segment, before):
                continue
            ended = [trace.ended for _, trace, _ in _messages(segment)]
            if any(time < before for time in ended):
                if segment == self._segment(self._next - 1):
                    self.close()
                deleted += _delete(
                    segment,
                    lambda trace: trace.ended < before,
                    last=segment == self.segments()[-1],
                )
            self._oldest.note(segment, (time for time in ended if time >= before))
        return deleted

    def read(self) -> Iterator[tuple[VerifyTrace, list[bytes]]]:
        """Every whole message, oldest first: (header, tensor frames)."""
        return ((trace, frames) for _, trace, frames in self.read_marked())

    def read_marked(self) -> Iterator[tuple[Mark, VerifyTrace, list[bytes]]]:
        """Every whole message with its place: (mark, header, tensor frames)."""
        for segment in self.segments():
            for number, trace, frames in _messages(segment):
                yield (int(segment.stem), number), trace, frames[1:]


def _delete(segment: Path, unwanted: Callable[[VerifyTrace], bool], *, last: bool) -> int:
    """An empty message stands in for each that is deleted, so that the others keep their numbers."""
    gone = {number for number, trace, _ in _messages(segment) if unwanted(trace)}
    if not gone:
        return 0
    partial = segment.with_suffix(".partial")
    kept = number = 0
    with (
        open(segment, "rb") as source,
        open(partial, "wb", opener=owner_only) as copy,
    ):
        while (frames := read_frames(source)) is not None:
            deleted = number in gone or frames == [b""]
            kept += not deleted
            for piece in pack_frames([b""] if deleted else frames):
                copy.write(piece)
            number += 1
        copy.flush()
        os.fsync(copy.fileno())
    if kept or last:  # the last number that was used stays on the disk
        os.replace(partial, segment)
    else:
        segment.unlink()
        partial.unlink()
    sync_folder(segment.parent)
    return len(gone)


def _messages(segment: Path) -> Iterator[tuple[int, VerifyTrace, list[bytes]]]:
    """(number, header, all frames) of each whole message that fits the schema."""
    number = 0
    with open(segment, "rb") as file:
        while (frames := read_frames(file)) is not None:
            with contextlib.suppress(RecordError):
                yield number, decode_trace(frames), frames
            number += 1
