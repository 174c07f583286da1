"""One drafter in training: module, trainer, vocabulary, counters; saved and restored as one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from learner.batch import Span, SpanBatch, collate
from learner.drafters.base import Drafter
from learner.objective import DistillObjective
from learner.target import Target
from learner.vocabulary import TrafficCounts, follow_traffic
from rlcore.checkpoint import load_checkpoint, save_checkpoint
from rlcore.optim import MuonAdamW
from rlcore.precision import mixed_precision
from rlcore.settings import LearnSettings
from rlcore.trainer import LossOutput, Objective, Trainer, UpdateMetrics

MICRO_BATCH_ROWS = 768
"""Padded rows that go through the drafter at once; bounds memory, not the update's size."""


class TrainingSession:
    """Configures the one Trainer of the project for a drafter."""

    def __init__(self, drafter: Drafter, target: Target, settings: LearnSettings) -> None:
        self.drafter = drafter
        self.target = target
        self._steps = settings.unroll or settings.speculative_tokens
        self.counts = TrafficCounts(target.vocab_size)
        self.tokens_seen = 0
        self.trainer: Trainer = Trainer(
            drafter,
            self._objective(),
            MuonAdamW(
                drafter.named_parameters(), muon_lr=settings.lr_matrix, adamw_lr=settings.lr_other
            ),
            seed=settings.seed,
        )

    def _objective(self) -> Objective[Drafter, SpanBatch]:
        distill = DistillObjective(self.target.lm_head[self.drafter.vocab], steps=self._steps)

        def objective(drafter: Drafter, batch: SpanBatch, /) -> LossOutput:
            with mixed_precision():
                return distill(drafter, batch)

        return objective

    def update(self, spans: list[Span]) -> UpdateMetrics:
        """One optimizer step on these spans."""
        self.drafter.train()
        batches = [collate(part, with_aux=self.drafter.needs_aux) for part in micro_batches(spans)]
        metrics = self.trainer.update(batches)
        self.tokens_seen += sum(span.anchors for span in spans)
        return metrics

    def follow_traffic(self) -> int:
        """Move the draft vocabulary to what was seen; the number of tokens that came in."""
        changed = follow_traffic(
            self.drafter, self.target, self.counts.counts, self.trainer.optimizer
        )
        if changed:
            self.trainer.objective = self._objective()
        return changed

    def save(self, folder: Path, facts: dict[str, Any]) -> None:
        """Raises OSError when the disk cannot take it; the checkpoint before stays then."""
        tensors, counters = self.trainer.state()
        tensors["session.vocab"] = self.drafter.vocab
        tensors["session.counts"] = self.counts.counts
        save_checkpoint(
            folder, tensors, {**facts, "trainer": counters, "tokens_seen": self.tokens_seen}
        )

    def load(self, folder: Path) -> dict[str, Any] | None:
        """Restore from a checkpoint and give back its facts; None when there is none.

        Raises CheckpointError when it is damaged, KeyError when it is of another drafter.
        """
        found = load_checkpoint(folder)
        if found is None:
            return None
        tensors, facts = found
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
