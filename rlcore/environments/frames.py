"""What the environment host and its workers say to each other: msgpack in length-prefixed frames."""

from __future__ import annotations

import struct
from typing import Any, BinaryIO

import msgspec

from rlcore.environments.base import Message, Score, Split, Task, Turn

MAX_FRAME_BYTES = 16 << 20
"""Far above any conversation; a longer frame is a mistake and is refused before it is read."""

PREFIX = struct.Struct(">I")


class FrameTooLarge(ValueError):
    """A message over MAX_FRAME_BYTES."""


class Start(msgspec.Struct, tag=True):
    """The first message: which environment. Answered by Ready or Fault."""

    spec: str
    options: dict[str, Any]
    parent: int


class GetTask(msgspec.Struct, tag=True):
    split: Split
    index: int


class Reset(msgspec.Struct, tag=True):
    episode: int
    task: Task


class Step(msgspec.Struct, tag=True):
    episode: int
    reply: str


class GetScore(msgspec.Struct, tag=True):
    """Ends the episode as well."""

    episode: int


class Close(msgspec.Struct, tag=True):
    """Ends an episode without a score. Answered by Closed."""

    episode: int


Request = Start | GetTask | Reset | Step | GetScore | Close


class Ready(msgspec.Struct, tag=True):
    train: int | None
    test: int | None
    replayable: bool


class TaskIs(msgspec.Struct, tag=True):
    task: Task


class Opened(msgspec.Struct, tag=True):
    messages: list[Message]


class Took(msgspec.Struct, tag=True):
    turn: Turn


class Scored(msgspec.Struct, tag=True):
    score: Score


class Closed(msgspec.Struct, tag=True):
    pass


class Fault(msgspec.Struct, tag=True):
    """``reason``: ``usage`` (the caller's mistake), ``reward`` (not finite), ``error`` (an exception)."""

    reason: str
    detail: str


Answer = Ready | TaskIs | Opened | Took | Scored | Closed | Fault


def pack(message: Request | Answer) -> bytes:
    """A frame. Raises FrameTooLarge."""
    body = msgspec.msgpack.encode(message)
    if len(body) > MAX_FRAME_BYTES:
        raise FrameTooLarge(f"a message of {len(body)} bytes; at most {MAX_FRAME_BYTES} are sent")
    return PREFIX.pack(len(body)) + body


def frame_length(prefix: bytes) -> int:
    """Bytes that follow a prefix. Raises FrameTooLarge before anything is allocated."""
    (length,) = PREFIX.unpack(prefix)
    if length > MAX_FRAME_BYTES:
        raise FrameTooLarge(f"a frame of {length} bytes; at most {MAX_FRAME_BYTES} are read")
    return int(length)


def read_frame(stream: BinaryIO) -> bytes | None:
    """The next frame's body, or None at the end of the stream."""
    prefix = stream.read(PREFIX.size)
    if len(prefix) < PREFIX.size:
        return None
    length = frame_length(prefix)
    body = stream.read(length)
    return body if len(body) == length else None
