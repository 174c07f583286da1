"""Recorded per-request figures (numbers only) that the controllers' simulations draw from."""

import json
import random
from pathlib import Path

DATA = Path(__file__).parents[1] / "data"

Pair = tuple[int, int, int]
"""(output tokens, steps of one version, steps of the other)"""


def paired_steps(traffic: str, one: int, other: int) -> list[Pair]:
    table = json.loads((DATA / "paired_steps.json").read_text())[traffic]
    i, j = (1 + table["versions"].index(version) for version in (one, other))
    return [(row[0], row[i], row[j]) for row in table["rows"]]


def acceptance(traffic: str, version: int) -> list[tuple[int, int]]:
    """(drafted steps, tokens they emitted) of each request of one version."""
    table = json.loads((DATA / "acceptance_by_request.json").read_text())
    return [(steps, emitted) for steps, emitted in table[traffic][str(version)]]


def acceptance_length(pairs: list[Pair]) -> float:
    """Of the two versions together."""
    return 2 * sum(t for t, _, _ in pairs) / sum(a + b for _, a, b in pairs)


def shorter(draw: random.Random, tokens: int, steps: int, length: float, drop: float) -> int:
    """Steps for the same tokens when ``drop`` of a mean acceptance length ``length`` is lost.

    Each accepted token is rejected with the probability that makes it so.
    """
    share = (1 / (length - drop) - 1 / length) / (1 - 1 / length)
    return steps + sum(draw.random() < share for _ in range(tokens - steps))
