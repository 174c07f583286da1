"""Server-sent events of ``GET /v1/paceline/feed``: lines in, typed events out. No I/O."""

from __future__ import annotations

import msgspec

from rlcore.feed import Change, History, Sample

FeedEvent = History | Sample | Change

TYPES: dict[str, type[FeedEvent]] = {"history": History, "sample": Sample, "change": Change}


class FeedParser:
    """Takes the stream line by line; comments and events of another name are passed over."""

    def __init__(self) -> None:
        self._name = ""
        self._data: list[str] = []

    def line(self, text: str) -> FeedEvent | None:
        """The event that this line completes. Raises ``msgspec.DecodeError`` for a malformed one."""
        if text:
            name, _, value = text.partition(":")
            value = value.removeprefix(" ")
            if name == "event":
                self._name = value
            elif name == "data":
                self._data.append(value)
            return None
        kind, data = TYPES.get(self._name), "\n".join(self._data)
        self._name, self._data = "", []
        return msgspec.json.decode(data, type=kind) if kind is not None and data else None
