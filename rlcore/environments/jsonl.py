"""Files of tasks: one JSON object a line, cut into train and test by the question's text."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import msgspec

from rlcore.environments.base import Split, split_of
from rlcore.errors import UsageError

MAX_FILE_BYTES = 1 << 30
"""A file is read whole by every worker; one far larger than any set of problems is a mistake."""

Row = dict[str, Any]


def first_field(row: Row, names: Sequence[str]) -> Any:
    """The first of these fields that the row has; None without any."""
    return next((row[name] for name in names if row.get(name) is not None), None)


def read_rows(path: str, question: Sequence[str]) -> list[Row]:
    """The objects of a file; each has a text in one of the ``question`` fields, else UsageError."""
    try:
        stat = Path(path).stat()
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}") from None
    if stat.st_size > MAX_FILE_BYTES:
        raise UsageError(f"{path} has {stat.st_size} bytes; at most {MAX_FILE_BYTES} are read")
    return _read(path, tuple(question), stat.st_mtime_ns)


def split_rows(
    file: str, test_file: str | None, question: Sequence[str], test_share: float
) -> dict[Split, list[Row]]:
    """Without ``test_file``, a hash of the question decides; with it, that file is the test split and
    its questions are left out of the other. Raises UsageError if a split is empty."""
    rows = read_rows(file, question)
    if test_file is None:
        splits = [split_of(first_field(row, question), test_share) for row in rows]
        train = [row for row, split in zip(rows, splits, strict=True) if split == "train"]
        test = [row for row, split in zip(rows, splits, strict=True) if split == "test"]
    else:
        test = read_rows(test_file, question)
        held_out = {first_field(row, question) for row in test}
        train = [row for row in rows if first_field(row, question) not in held_out]
    if not train or not test:
        raise UsageError(
            f"{file} gives {len(train)} training and {len(test)} test tasks; both are needed"
        )
    return {"train": train, "test": test}


@lru_cache(8)
def _read(path: str, question: tuple[str, ...], changed: int) -> list[Row]:
    """Cached for the many instances in a worker; ``changed`` makes a changed file another one."""
    rows = []
    with open(path, "rb") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                row = msgspec.json.decode(line, type=Row)
            except msgspec.DecodeError as error:
                raise UsageError(f"{path}, line {number}: {error}") from None
            if not isinstance(first_field(row, question), str):
                raise UsageError(f"{path}, line {number}: no text in {' or '.join(question)}")
            rows.append(row)
    return rows
