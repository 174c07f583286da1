"""Numbers in what a model wrote."""

from __future__ import annotations

import re

_NUMBER = re.compile(r"(?<![\w.])[-+\u2212]?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?")
"""A sign counts where no word or number stands right before it: in 3-4 it is an operator."""


def last_number(text: str) -> float | None:
    """The last number in a text, thousands commas allowed; None where there is none.

    Lenient on purpose: whatever stands around the number, ``7``, ``= 7.`` and ``the answer is 7!``
    are the same answer, so that nothing is gained by learning a format.
    """
    found = _NUMBER.findall(text)
    return float(found[-1].replace(",", "").replace("\u2212", "-")) if found else None


def as_number(text: str) -> float | None:
    """The number that the whole text is, or None."""
    stripped = text.strip()
    return last_number(stripped) if _NUMBER.fullmatch(stripped) else None
