"""In which blocks the prompts are sent, and which mode goes first. Pure functions.

All modes get a block's requests right after each other, in an order that changes from block to
block, so that a machine that becomes slower or faster favours none of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec

from clients.bench.common import BenchError
from clients.bench.phases import Phase
from clients.workload import Prompt

ONLINE = "online"
"""The mode that learns: it gets every block."""

OURS = ("frozen", ONLINE)
"""Served by Paceline; the other modes are plain vLLM."""


class Block(msgspec.Struct, frozen=True):
    """Some prompts, and the modes that get them, in their order."""

    number: int
    phase: str
    measured: bool
    """Part of the window at the end of its phase, which all modes get and figures come from."""
    modes: tuple[str, ...]
    prompts: tuple[Prompt, ...]
    concurrency: int
    """Requests under way at a time, where they have no arrival times of their own."""


def plan(
    phases: Sequence[Phase],
    modes: Sequence[str],
    *,
    size: int,
    measure: int,
    every: int,
    concurrency: int,
    alone_concurrency: int | None = None,
) -> list[Block]:
    """Blocks of ``size`` prompts; the last ``measure`` prompts of a phase are its measured window.

    Before the window, modes other than online get one block in ``every``, none if that is 0. Blocks
    that online gets alone are sent at ``alone_concurrency``, by default the same as the others.
    Raises BenchError when a phase has too few prompts.
    """
    blocks: list[Block] = []
    shared = 0
    for phase in phases:
        traffic = len(phase.prompts) - measure
        if traffic < 0:
            raise BenchError(
                f"phase {phase.name} has {len(phase.prompts)} prompts, fewer than --measure {measure}"
            )
        parts = [(False, part) for part in _parts(phase.prompts[:traffic], size)]
        parts += [(True, part) for part in _parts(phase.prompts[traffic:], size)]
        for position, (measured, prompts) in enumerate(parts):
            everyone = measured or (every > 0 and position % every == 0)
            takers = order(modes, shared) if everyone else tuple(m for m in modes if m == ONLINE)
            shared += everyone
            width = concurrency if everyone else alone_concurrency or concurrency
            if takers:
                blocks.append(Block(len(blocks), phase.name, measured, takers, prompts, width))
    return blocks


def order(modes: Sequence[str], number: int) -> tuple[str, ...]:
    """Every second time backwards, and begun by the next mode after each two times.

    Over twice as many blocks as modes, each mode stands equally often at each place.
    """
    start = number // 2 % len(modes)
    turned = [*modes[start:], *modes[:start]]
    return tuple(reversed(turned) if number % 2 else turned)


def _parts(prompts: Sequence[Prompt], size: int) -> Iterator[tuple[Prompt, ...]]:
    for start in range(0, len(prompts), size):
        yield tuple(prompts[start : start + size])
