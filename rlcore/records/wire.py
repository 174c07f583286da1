"""What all records share: the types of their fields, the encoding of a header, the error of a bad one."""

from __future__ import annotations

import math
from typing import Annotated

import msgspec
from msgspec import Meta

SCHEMA_VERSION = 1

MAX_HEADER_BYTES = 8 * 1024 * 1024
"""A header holds token ids and steps only; 8 MiB is far above the longest allowed span."""

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}

Id = Annotated[str, Meta(max_length=256)]
TokenId = Annotated[int, Meta(ge=0, le=2**31 - 1)]
Count = Annotated[int, Meta(ge=0)]
Position = Annotated[int, Meta(ge=0, le=2**31 - 1)]
Seconds = Annotated[float, Meta(ge=0)]


class RecordError(ValueError):
    """A message that does not fit the schema. ``reason`` is a short word, used as a metric label."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(f"{reason}: {detail}")
        self.reason = reason


class TensorSpec(msgspec.Struct, frozen=True, array_like=True):
    """Name, dtype and shape of one tensor frame."""

    name: Id
    dtype: Annotated[str, Meta(max_length=16)]
    shape: Annotated[tuple[Count, ...], Meta(max_length=4)]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * DTYPE_BYTES[self.dtype]


_encoder = msgspec.msgpack.Encoder()


def encode(message: msgspec.Struct) -> bytes:
    """The msgpack header of a message."""
    return _encoder.encode(message)


def decode(decoder: msgspec.msgpack.Decoder, header: bytes | memoryview):
    """A header of any link, by the link's own decoder; raises RecordError."""
    if len(header) > MAX_HEADER_BYTES:
        raise RecordError("oversized", f"header of {len(header)} bytes, at most {MAX_HEADER_BYTES}")
    try:
        message = decoder.decode(header)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise RecordError("malformed", str(error)) from None
    if message.schema != SCHEMA_VERSION:
        raise RecordError("schema", f"schema {message.schema}, this side speaks {SCHEMA_VERSION}")
    return message
