"""One drafter in training: module, trainer, vocabulary, counters; saved and restored as one."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor

from learner.batch import Span, SpanBatch, collate
from learner.blend import HEAD
from learner.drafters.base import Drafter
from learner.objective import DistillObjective
from learner.objectives.named import recipe
from learner.objectives.outcomes import ServedBatch
from learner.target import Target
from learner.vocabulary import TrafficCounts, follow_traffic
from rlcore.checkpoint import CheckpointError, load_checkpoint, save_checkpoint
from rlcore.optim import MuonAdamW
from rlcore.precision import mixed_precision
from rlcore.settings import DrafterSettings
from rlcore.trainer import LossOutput, Objective, Trainer, UpdateMetrics

MICRO_BATCH_ROWS = 768
"""Padded rows that go through the drafter at once; bounds memory, not the update's size."""

AVERAGE_HALF_LIFE = 10.0
"""Updates after which a past state of the weights counts half in the average that is judged."""

ORTHOGONALISE_BLOCK = 192
"""Width of the pieces that Muon orthogonalises: less than half the time of whole matrices."""

CHECKPOINT_SCHEMA = 3
"""A checkpoint of another one is not gone on from."""


class TrainingSession:
    """Configures the one Trainer of the project for a drafter."""

    def __init__(self, drafter: Drafter, target: Target, settings: DrafterSettings) -> None:
        self.drafter = drafter
        self.target = target
        self._steps = settings.unroll or settings.speculative_tokens
        self._recipe = recipe(settings.objective)
        self.counts = TrafficCounts(target.vocab_size)
        self.tokens_seen = 0
        self.trainer: Trainer = Trainer(
            drafter,
            self._objective(),
            MuonAdamW(
                drafter.named_parameters(),
                muon_lr=settings.lr_matrix,
                adamw_lr=settings.lr_other,
                orthogonalise_block=ORTHOGONALISE_BLOCK,
            ),
            average_half_life=AVERAGE_HALF_LIFE,
            seed=settings.seed,
        )

    def _objective(self) -> Objective[Drafter, SpanBatch]:
        distill = DistillObjective(
            self.target.lm_head[self.drafter.vocab],
            steps=self._steps,
            loss=self._recipe.loss,
            outcomes=self._recipe.outcomes,
        )

        def objective(drafter: Drafter, batch: SpanBatch, /) -> LossOutput:
            with mixed_precision():
                return distill(drafter, batch)

        return objective

    def retarget(self, target: Target) -> None:
        """The target has new weights; the drafter learns on from where it is."""
        self.target = target
        self.drafter.retarget(target)
        self.trainer.objective = self._objective()

    def update(self, spans: list[Span]) -> UpdateMetrics:
        """One optimizer step on these spans."""
        self.drafter.train()
        batches = [
            ServedBatch.of(collate(part, with_aux=self.drafter.needs_aux), part)
            for part in micro_batches(spans)
        ]
        metrics = self.trainer.update(batches)
        self.tokens_seen += sum(span.anchors for span in spans)
        return metrics

    @contextmanager
    def candidate(self) -> Iterator[Drafter]:
        """The drafter as it is judged and published: averaged weights, in evaluation mode."""
        self.drafter.eval()
        with self.trainer.averaged() as drafter:
            yield drafter

    def follow_traffic(self) -> int:
        """Move the draft vocabulary to what was seen; the number of tokens that came in."""
        before = self.drafter.vocab
        changed = follow_traffic(
            self.drafter, self.target, self.counts.counts, self.trainer.optimizer
        )
        if changed:
            self._move_average(before)
            self.trainer.objective = self._objective()
        return changed

    def _move_average(self, before: Tensor) -> None:
        """Rows of tokens that stay move to their new places; the others start at the weights'."""
        place = torch.searchsorted(before, self.drafter.vocab).clamp(max=len(before) - 1)
        stays = (before[place] == self.drafter.vocab).unsqueeze(1)
        weight = self.trainer.optimizer.parameters[HEAD].detach()
        average = self.trainer.average[HEAD]
        average.copy_(torch.where(stays, average[place], weight))

    def take_counters(self, other: Self) -> None:
        """What was counted by the session that this one follows; its weights are not taken."""
        self.counts = other.counts
        self.tokens_seen = other.tokens_seen

    def save(self, folder: Path, facts: dict[str, Any]) -> None:
        """Raises OSError when the disk cannot take it; the checkpoint before stays then."""
        tensors, counters = self.trainer.state()
        tensors["session.vocab"] = self.drafter.vocab
        tensors["session.counts"] = self.counts.counts
        own = {
            "schema": CHECKPOINT_SCHEMA,
            "trainer": counters,
            "tokens_seen": self.tokens_seen,
        }
        save_checkpoint(folder, tensors, {**facts, **own})

    def load(self, folder: Path) -> dict[str, Any] | None:
        """Restore from a checkpoint and give back its facts; None when there is none.

        Raises CheckpointError when it is damaged or of another schema, KeyError when it is of
        another drafter.
        """
        found = load_checkpoint(folder)
        if found is None:
            return None
        tensors, facts = found
        if facts.get("schema") != CHECKPOINT_SCHEMA:
            raise CheckpointError(f"{folder}: another version of the learner wrote it")
        vocab = tensors.pop("session.vocab")
        if vocab.shape != self.drafter.vocab.shape:
            raise KeyError("the checkpoint's draft vocabulary has another size")
        self.drafter.vocab = vocab
        self.counts.counts = tensors.pop("session.counts")
        self.trainer.load_state(tensors, facts["trainer"])
        self.trainer.objective = self._objective()
        self.tokens_seen = facts["tokens_seen"]
        return facts


def micro_batches(spans: list[Span]) -> list[list[Span]]:
    """Spans of similar length together, so that little is padding."""
    parts: list[list[Span]] = []
    for span in sorted(spans, key=lambda s: s.rows):
        if parts and (len(parts[-1]) + 1) * span.rows <= MICRO_BATCH_ROWS:
            parts[-1].append(span)
        else:
            parts.append([span])
    return parts


def use_threads(count: int) -> None:
    torch.set_num_threads(count)


M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
"""Parameters of glibc's mallopt (malloc.h)."""


def keep_freed_memory() -> None:
    """Have glibc reuse freed tensors of up to 32 MB in place of giving them back to the system.

    By default each is mapped anew and its pages are zeroed at first touch, for every tensor of every
    update. Elsewhere than on Linux this does nothing.
    """
    if sys.platform == "linux":
        libc = ctypes.CDLL(None)
        libc.mallopt(M_MMAP_THRESHOLD, 32 << 20)
        libc.mallopt(M_TRIM_THRESHOLD, 512 << 20)
