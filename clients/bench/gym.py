"""Writes workload files of made-up tasks: ``python -m clients.bench.gym --task gsm_symbolic ...``.

Public prompt sets are short; the generators of the package reasoning-gym go on for as long as one
likes, so a stream can be long and unseen throughout. The same seed makes the same file, and files of
one task with different seeds are checked against each other with --avoid.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Collection, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from clients.bench.common import BenchError, run_main
from clients.workload import Prompt, WorkloadError, read_workload

TRIES = 20
"""Tasks drawn for each prompt wanted, before the generator counts as exhausted."""


def tasks_of(name: str, size: int, seed: int) -> Iterable[dict[str, Any]]:
    """``size`` tasks with ``question`` and ``answer``; raises BenchError."""
    try:
        import reasoning_gym
        from reasoning_gym.factory import DATASETS
    except ImportError as error:
        raise BenchError(
            f"reasoning-gym cannot be imported ({error}); pip install reasoning-gym"
        ) from None
    if name not in DATASETS:
        raise BenchError(f"--task {name}: there are {', '.join(sorted(DATASETS))}")
    tasks: Iterable[dict[str, Any]] = reasoning_gym.create_dataset(name, size=size, seed=seed)
    return tasks


def prompts(
    tasks: Iterable[dict[str, Any]], name: str, count: int, seed: int, avoid: Collection[str]
) -> Iterator[Prompt]:
    """``count`` different prompts, none with a key in ``avoid``; raises BenchError."""
    seen = set(avoid)
    made = 0
    for number, task in enumerate(tasks):
        if made == count:
            return
        prompt = Prompt(
            id=f"gym-{name}-{seed}-{number}",
            turns=(task["question"].strip(),),
            source=f"reasoning-gym {name}",
            answer=None if task["answer"] is None else str(task["answer"]),
        )
        if prompt.key and prompt.key not in seen:
            seen.add(prompt.key)
            made += 1
            yield prompt
    if made < count:
        raise BenchError(f"{name} has only {made} different prompts of {count} that were asked for")


def line(prompt: Prompt) -> str:
    fields: dict[str, Any] = {"id": prompt.id, "source": prompt.source, "turns": prompt.turns}
    if prompt.answer is not None:
        fields["answer"] = prompt.answer
    return json.dumps(fields, ensure_ascii=False) + "\n"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m clients.bench.gym", description=__doc__)
    parser.add_argument("--task", required=True, metavar="NAME", help="for example gsm_symbolic")
    parser.add_argument("--count", type=int, required=True, metavar="N", help="prompts")
    parser.add_argument("--seed", type=int, default=0, help="default: 0")
    parser.add_argument("--out", type=Path, required=True, metavar="FILE.jsonl")
    parser.add_argument(
        "--avoid", type=Path, nargs="+", default=[], metavar="FILE", help="prompts never written"
    )
    args = parser.parse_args(argv)
    if args.count <= 0:
        parser.error("--count must be above 0")
    if not args.out.absolute().parent.is_dir():
        parser.error(f"{args.out}: its folder does not exist")
    try:
        avoid = {prompt.key for path in args.avoid for prompt in read_workload(path)}
    except WorkloadError as error:
        raise BenchError(str(error)) from None
    tasks = tasks_of(args.task, TRIES * args.count, args.seed)
    text = "".join(map(line, prompts(tasks, args.task, args.count, args.seed, avoid)))
    args.out.write_text(text, encoding="utf-8")
    print(f"{args.count} prompts: {args.out}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    run_main(main)
