"""Prompts for load and benchmarks: JSONL files of ``{"id", "source", "turns": [user text, ...]}``.

A figure measured on a prompt that was sent before measures memory, so a set of prompts holds each
text once, however many files bring it (Spec-Bench's maths questions, for one, are GSM8K's).
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta


class WorkloadError(ValueError):
    """A workload file that cannot be used; the message names the file and the line."""


class Prompt(msgspec.Struct, frozen=True):
    """One line of a workload file."""

    id: Annotated[str, Meta(min_length=1)]
    turns: Annotated[tuple[str, ...], Meta(min_length=1)]
    source: str = ""
    answer: str | None = None

    @property
    def key(self) -> str:
        """Prompts with one key are the same prompt: white space aside, the same first turn."""
        return " ".join(self.turns[0].split())

    def messages(self, answers: Sequence[str] = ()) -> list[dict[str, str]]:
        """Chat messages that ask the turn after those answered; without answers, the first."""
        if len(answers) >= len(self.turns):
            raise ValueError(f"prompt {self.id} has {len(self.turns)} turns, all of them answered")
        messages: list[dict[str, str]] = []
        for turn, answer in zip(self.turns, answers, strict=False):
            messages += [
                {"role": "user", "content": turn},
                {"role": "assistant", "content": answer},
            ]
        messages.append({"role": "user", "content": self.turns[len(answers)]})
        return messages


class PromptSet(msgspec.Struct, frozen=True):
    """Prompts in the order in which they are to be sent, each once."""

    prompts: tuple[Prompt, ...]
    files: tuple[str, ...]
    seed: int
    duplicates: int
    """Lines left out because another line has the same prompt."""


_decoder = msgspec.json.Decoder(Prompt)


def read_workload(path: Path) -> list[Prompt]:
    """The prompts of one file, in its order; raises WorkloadError."""
    try:
        lines = path.read_bytes().split(b"\n")
    except OSError as error:
        raise WorkloadError(f"{path}: {error.strerror}") from None
    prompts = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            prompt = _decoder.decode(line)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise WorkloadError(f"{path}:{number}: {error}") from None
        if not prompt.key:
            raise WorkloadError(f"{path}:{number}: the first turn is empty")
        prompts.append(prompt)
    if not prompts:
        raise WorkloadError(f"{path}: no prompts in it")
    return prompts


def without_repeats(prompts: Iterable[Prompt]) -> list[Prompt]:
    """Each text once, the first one kept; raises WorkloadError when one id stands for two texts."""
    by_key: dict[str, Prompt] = {}
    by_id: dict[str, str] = {}
    for prompt in prompts:
        if by_id.setdefault(prompt.id, prompt.key) != prompt.key:
            raise WorkloadError(f"two different prompts have the id {prompt.id}")
        by_key.setdefault(prompt.key, prompt)
    return list(by_key.values())


def load_prompts(paths: Sequence[Path], seed: int = 0) -> PromptSet:
    """All files' prompts, each text once, shuffled by the seed; raises WorkloadError."""
    every = [prompt for path in paths for prompt in read_workload(path)]
    prompts = without_repeats(every)
    random.Random(seed).shuffle(prompts)
    return PromptSet(
        prompts=tuple(prompts),
        files=tuple(path.name for path in paths),
        seed=seed,
        duplicates=len(every) - len(prompts),
    )
