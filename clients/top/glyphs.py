"""Curves, bars and large digits made of characters. Pure."""

from __future__ import annotations

from collections.abc import Sequence

BLOCKS = "▁▂▃▄▅▆▇█"

DIGITS = {
    "0": ("█▀█", "█ █", "▀▀▀"),
    "1": ("▀█ ", " █ ", "▀▀▀"),
    "2": ("▀▀█", "█▀▀", "▀▀▀"),
    "3": ("▀▀█", " ▀█", "▀▀▀"),
    "4": ("█ █", "▀▀█", "  ▀"),
    "5": ("█▀▀", "▀▀█", "▀▀▀"),
    "6": ("█▀▀", "█▀█", "▀▀▀"),
    "7": ("▀▀█", "  █", "  ▀"),
    "8": ("█▀█", "█▀█", "▀▀▀"),
    "9": ("█▀█", "▀▀█", "▀▀▀"),
    ".": (" ", " ", "▀"),
    "x": ("   ", "▀▄▀", "▀ ▀"),
    "-": ("   ", "▀▀▀", "   "),
}
DIGIT_ROWS = 3


def large(text: str) -> list[str]:
    """Digits, ``.``, ``-`` and ``x`` in DIGIT_ROWS rows of equal width."""
    return [" ".join(DIGITS[character][row] for character in text) for row in range(DIGIT_ROWS)]


def bar(share: float, width: int) -> str:
    """``width`` columns, of which ``share`` (0 to 1) are filled."""
    filled = round(max(0.0, min(1.0, share)) * width)
    return "█" * filled + "·" * (width - filled)


def curve(
    points: Sequence[tuple[float, float | None]], width: int, *, end: float, span: float, low: float
) -> str:
    """(time, value) points as ``width`` columns of equal time up to ``end``, blank where none fell.

    A column is the mean of its values, from ``low`` (or the least mean below it) to the largest mean.
    """
    if width <= 0:
        return ""
    columns: list[list[float]] = [[] for _ in range(width)]
    for time, value in points:
        place = width - 1 - int((end - time) / span * width)
        if value is not None and 0 <= place < width:
            columns[place].append(value)
    means = [sum(column) / len(column) if column else None for column in columns]
    known = [mean for mean in means if mean is not None]
    if not known:
        return " " * width
    floor, top = min(low, *known), max(known)
    height = (top - floor) or 1.0
    return "".join(
        " " if mean is None else BLOCKS[round((mean - floor) / height * (len(BLOCKS) - 1))]
        for mean in means
    )
