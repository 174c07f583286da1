"""Phases of a benchmark: which prompts are sent in which order, none of them twice.

A phase is written ``[NAME=]FILE[,FILE...][:N]``. Several phases are a shift of traffic. A file may
stand in several phases: its prompts are then divided among them.
"""

from __future__ import annotations

import random
import re
from collections.abc import Collection, Sequence
from pathlib import Path

import msgspec

from clients.bench.common import BenchError
from clients.workload import Prompt, WorkloadError, read_workload, without_repeats

SPEC = re.compile(r"(?:(?P<name>[^=/,]+)=)?(?P<files>.+?)(?::(?P<count>\d+))?")


class PhaseSpec(msgspec.Struct, frozen=True):
    """A phase as it was asked for. ``count`` None means as many prompts as there are."""

    name: str
    files: tuple[Path, ...]
    count: int | None = None


class Phase(msgspec.Struct, frozen=True):
    """A phase with its prompts, in the order in which they are sent."""

    name: str
    files: tuple[Path, ...]
    prompts: tuple[Prompt, ...]


def parse_phases(texts: Sequence[str]) -> list[PhaseSpec]:
    """Raises BenchError. A phase without a name takes its first file's."""
    specs: list[PhaseSpec] = []
    for text in texts:
        match = SPEC.fullmatch(text)
        files = [] if match is None else [f for f in match["files"].split(",") if f]
        if match is None or not files:
            raise BenchError(f"--phase {text}: write [NAME=]FILE[,FILE...][:N]")
        count = None if match["count"] is None else int(match["count"])
        if count == 0:
            raise BenchError(f"--phase {text}: a phase needs prompts")
        taken = {spec.name for spec in specs}
        if match["name"] in taken:
            raise BenchError(f"two phases have the name {match['name']}")
        name = match["name"] or free_name(Path(files[0]).stem, taken)
        specs.append(PhaseSpec(name, tuple(Path(f) for f in files), count))
    return specs


def free_name(stem: str, taken: Collection[str]) -> str:
    """``chat``, then ``chat-2``."""
    number, name = 1, stem
    while name in taken:
        number += 1
        name = f"{stem}-{number}"
    return name


def load_phases(
    specs: Sequence[PhaseSpec], seed: int = 0, avoid: Sequence[Path] = ()
) -> list[Phase]:
    """The phases with their prompts, shuffled by the seed; raises BenchError.

    ``avoid`` names files of prompts that are never sent, such as those a drafter was trained on.
    """
    try:
        files = {path: read_workload(path) for spec in specs for path in spec.files}
        every = without_repeats(prompt for prompts in files.values() for prompt in prompts)
        avoided = {prompt.key for path in avoid for prompt in read_workload(path)}
    except WorkloadError as error:
        raise BenchError(str(error)) from None
    allowed = {prompt.key: prompt for prompt in every if prompt.key not in avoided}
    candidates = []
    for number, spec in enumerate(specs):
        keys = [prompt.key for path in spec.files for prompt in files[path]]
        random.Random(f"{seed}/{number}").shuffle(keys)
        candidates.append([key for key in keys if key in allowed])
    dealt = deal(candidates, [spec.count for spec in specs])
    for spec, keys in zip(specs, dealt, strict=True):
        if not keys or len(keys) < (spec.count or 0):
            raise BenchError(
                f"phase {spec.name} asks for {spec.count or 'some'} prompts and {len(keys)} are left "
                "for it; no prompt is sent twice"
            )
    return [
        Phase(spec.name, spec.files, tuple(allowed[key] for key in keys))
        for spec, keys in zip(specs, dealt, strict=True)
    ]


def deal(candidates: Sequence[Sequence[str]], counts: Sequence[int | None]) -> list[list[str]]:
    """Give each key to one taker at most; takers take one each in turn, in their own order.

    Takers with a count are served first, up to their counts; the others divide the rest.
    """
    given: set[str] = set()
    dealt: list[list[str]] = [[] for _ in candidates]
    sources = [iter(keys) for keys in candidates]
    for limited in (True, False):
        open_ = [i for i, count in enumerate(counts) if (count is not None) == limited]
        while open_:
            for i in list(open_):
                count = counts[i]
                full = count is not None and len(dealt[i]) >= count
                key = None if full else next((k for k in sources[i] if k not in given), None)
                if key is None:
                    open_.remove(i)
                else:
                    given.add(key)
                    dealt[i].append(key)
    return dealt
