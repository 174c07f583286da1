"""Messages of several frames in a file: the number of frames, their lengths, their bytes."""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator, Sequence
from typing import BinaryIO

from rlcore.transport import MAX_FRAME_BYTES, Frame

MAX_FRAMES = 8


def owner_only(path: str, flags: int) -> int:
    """An opener of files that hold messages: token ids are text, and nobody else's business."""
    return os.open(path, flags, 0o600)


def pack_frames(frames: Sequence[Frame]) -> Iterator[Frame]:
    """The pieces to write, one after the other; little-endian."""
    lengths = [len(frame) for frame in frames]
    yield struct.pack(f"<I{len(lengths)}Q", len(lengths), *lengths)
    yield from frames


def read_frames(file: BinaryIO, *, skip: bool = False) -> list[bytes] | None:
    """The next message's frames; None when the file ends before it does, or none begins here.

    ``skip`` goes over the frames' bytes and gives back empty ones.
    """
    head = file.read(4)
    if len(head) < 4:
        return None
    (count,) = struct.unpack("<I", head)
    if not 0 < count <= MAX_FRAMES:
        return None
    table = file.read(8 * count)
    if len(table) < 8 * count:
        return None
    lengths = struct.unpack(f"<{count}Q", table)
    if max(lengths) > MAX_FRAME_BYTES:
        return None
    if skip:
        end = file.tell() + sum(lengths)
        if os.fstat(file.fileno()).st_size < end:
            return None
        file.seek(end)
        return [b""] * count
    frames = [file.read(length) for length in lengths]
    return frames if all(len(f) == n for f, n in zip(frames, lengths, strict=True)) else None
