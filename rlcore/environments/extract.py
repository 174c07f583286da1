"""The answer in a reply."""

from __future__ import annotations

import re
from typing import Literal, get_args

from rlcore.errors import UsageError

Extraction = Literal["auto", "last_number", "answer_tags", "last_line", "whole"]
"""Where a reply's answer stands: in ``<answer>`` tags (the last pair; no tags, no answer), on its last
line that is not empty, or it is the whole reply. ``last_number`` and ``auto`` are up to the
environment."""

_TAGS = re.compile(r"<answer>(.*?)</answer>", re.DOTALL | re.IGNORECASE)


def check_extraction(name: str) -> Extraction:
    """Returns it; raises UsageError for an unknown one."""
    for known in get_args(Extraction):
        if name == known:
            return known
    raise UsageError(f"extract is {name!r}; it can be {', '.join(get_args(Extraction))}")


def answer_tags(reply: str) -> str | None:
    found = _TAGS.findall(reply)
    return found[-1].strip() if found else None


def last_line(reply: str) -> str | None:
    lines = reply.strip().splitlines()
    return lines[-1].strip() if lines else None


def whole(reply: str) -> str | None:
    return reply.strip() or None


def tags_or_rest(reply: str, lines: int) -> str | None:
    """What stands in tags; without any, the last line, or all of it for answers of several lines."""
    tagged = answer_tags(reply)
    if tagged is not None:
        return tagged
    return last_line(reply) if lines <= 1 else whole(reply)
