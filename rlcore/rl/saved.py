"""A run's checkpoint: policy, optimizer, random states, books, and the groups that wait."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import torch

from rlcore.checkpoint import CheckpointError, load_checkpoint, save_checkpoint
from rlcore.errors import UsageError
from rlcore.rl.rollouts import Books
from rlcore.rollout import Rollout

FOLDER = "checkpoint"

BOOKS = ("admission", "order", "ledger", "chances")


@dataclass(frozen=True)
class Saved:
    tensors: dict[str, torch.Tensor]
    counters: dict[str, Any]
    """The trainer's."""
    books: dict[str, Any]
    waiting: dict[str, list[Rollout]]
    controllers: dict[str, Any]

    @property
    def update(self) -> int:
        return int(self.books["admission"]["version"])


def facts_of(
    identity: Mapping[str, Any],
    books: Books,
    waiting: Mapping[str, list[Rollout]],
    controllers: Mapping[str, Any],
) -> dict[str, Any]:
    """All but the trainer's state, as it is at this moment; JSON-able.

    ``identity``: what a resumed run must have in common.
    """
    return {
        "identity": dict(identity),
        "books": {
            "admission": books.admission.state(),
            "order": books.order.state(),
            "ledger": books.ledger.state(),
            "chances": None if books.chances is None else books.chances.state(),
        },
        "waiting": {name: msgspec.to_builtins(group) for name, group in waiting.items()},
        "controllers": dict(controllers),
    }


def save(
    out: Path, facts: Mapping[str, Any], state: tuple[dict[str, torch.Tensor], dict[str, Any]]
) -> None:
    """``state``: the trainer's. Raises OSError and leaves the checkpoint before."""
    tensors, counters = state
    save_checkpoint(out / FOLDER, tensors, {**facts, "counters": counters})


def load(out: Path, identity: Mapping[str, Any]) -> Saved:
    """Raises UsageError when there is none, it is damaged, or of another run."""
    try:
        found = load_checkpoint(out / FOLDER)
    except CheckpointError as error:
        raise UsageError(
            f"the checkpoint cannot be read ({error}); start anew in another --out"
        ) from None
    if found is None:
        raise UsageError(f"{out} holds no checkpoint to resume from; leave out --resume")
    tensors, facts = found
    try:
        for name, value in identity.items():
            if (had := dict(facts["identity"]).get(name)) != value:
                raise UsageError(
                    f"the checkpoint in {out} has {name} {had}, this run {value}; "
                    "resume with the same, or give another --out"
                )
        return Saved(
            tensors=tensors,
            counters=facts["counters"],
            books={name: facts["books"][name] for name in BOOKS},
            waiting=msgspec.convert(facts["waiting"], dict[str, list[Rollout]]),
            controllers=facts["controllers"],
        )
    except (LookupError, TypeError, msgspec.ValidationError) as error:
        raise UsageError(
            f"the checkpoint in {out} is not one of this version ({error!r}); start anew in another --out"
        ) from None


def restore(books: Books, saved: Saved) -> None:
    """The books as they were; what was under way is to be done again, what is finished waits.

    Raises UsageError when they are of another run.
    """
    if books.chances is not None and saved.books["chances"] is not None:
        books.chances.load_state(saved.books["chances"])
    books.order.load_state(saved.books["order"], [int(name) for name in saved.waiting])
    books.ledger.load_state(saved.books["ledger"])
    books.admission.load_state(saved.books["admission"])
    for name in books.admission.running:
        books.admission.dropped(name)
    kept = {r.rollout_id for group in saved.waiting.values() for r in group}
    for rollout in books.ledger.open:
        if rollout not in kept:
            books.ledger.lost(rollout)
