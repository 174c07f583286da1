"""In which blocks a sweep over concurrency sends its prompts. Pure functions.

A round goes through the levels and back again. So each level stands as early as late on average, and a
machine that slows down steadily (or a drafter that improves) favours none of them.
"""

from __future__ import annotations

from collections.abc import Sequence

from clients.bench.common import BenchError
from clients.bench.plan import Block, order
from clients.workload import Prompt

PROMPTS_A_STREAM, FEWEST = 2, 8
"""Prompts of a visit: so many a stream, and no fewer.

With the default levels, rounds, modes and token limit that is 25 minutes where 50 tokens/s are served
at concurrency 1 and 300 at 32.
"""


def visit_size(concurrency: int, per_level: int | None) -> int:
    """Prompts each time a level is visited."""
    return per_level or max(FEWEST, PROMPTS_A_STREAM * concurrency)


def visits(levels: Sequence[int], rounds: int) -> list[int]:
    """The levels in the order in which they are visited, each twice a round."""
    return [*levels, *reversed(levels)] * rounds


def sweep_plan(
    prompts: Sequence[Prompt],
    modes: Sequence[str],
    levels: Sequence[int],
    *,
    per_level: int | None,
    rounds: int,
) -> list[Block]:
    """A block a visit, of prompts of its own, for all modes; raises BenchError for too few prompts."""
    walk = visits(levels, rounds)
    needed = sum(visit_size(level, per_level) for level in walk)
    if len(prompts) < needed:
        raise BenchError(
            f"the sweep needs {needed} prompts, the files hold {len(prompts)} and none is sent twice; "
            "give more files, fewer levels or rounds, or a smaller --per-level"
        )
    blocks: list[Block] = []
    seen = dict.fromkeys(levels, 0)
    begin = 0
    for number, level in enumerate(walk):
        end = begin + visit_size(level, per_level)
        # Two visits are a pair of orders, forwards and backwards; neighbouring levels differ.
        turn = seen[level] + 2 * levels.index(level)
        taken = tuple(prompts[begin:end])
        blocks.append(Block(number, phase_of(level), True, order(modes, turn), taken, level))
        seen[level] += 1
        begin = end
    return blocks


def phase_of(level: int) -> str:
    return f"concurrency {level}"
