"""From a trace message to the replay: checked against the target, kept in memory and on disk."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from learner.batch import Span
from learner.drafters.registry import DRAFTERS
from learner.inbox import Inbox
from learner.journal import Journal
from learner.replay import Replay
from learner.split import HeldoutSplit
from learner.target import Target
from rlcore.log import get_logger
from rlcore.records import RecordError, VerifyTrace
from rlcore.settings import LearnSettings
from rlcore.transport import Frame

log = get_logger("learner")

HELDOUT_MARGIN = 1.3
"""Held-out tokens gathered early, over those the gate needs: the last of each span are not judged."""


PROMPT_HASH = re.compile("[0-9a-f]{32}")
"""What the capture writes; the held-out split reads it as a number."""


class Intake:
    """Owns the replay and its journal."""

    def __init__(self, settings: LearnSettings, folder: Path, target: Target) -> None:
        self._target = target
        self._needs_aux = DRAFTERS[settings.method].needs_aux
        budget = int(settings.replay_gib * 2**30)
        split = HeldoutSplit(settings.heldout_share, int(HELDOUT_MARGIN * settings.gate_tokens))
        self.replay = Replay(budget, split, settings.gate_tokens, settings.seed)
        self._journal = Journal(folder / "replay", budget)
        self.target_version = 0
        """Traces of another one are refused; the server's hello sets it."""
        self.received = 0
        """Spans taken, in total."""
        self.training_tokens = 0
        """Output positions received that may be trained on, in total."""

    def take(self, inbox: Inbox, seen: Callable[[Span], None]) -> bool:
        """Take what waits in the inbox; ``seen`` is called with each span to train on.

        False when there was nothing.
        """
        taken = inbox.traces(self._check)
        for trace, frames in taken:
            try:
                span = self._span(trace, frames[1:])
            except RecordError as error:
                inbox.reject(error.reason)
                continue
            if not self.replay.add(span):
                inbox.reject("nothing_new")
                continue
            self.received += 1
            self._keep(frames, inbox)
            if not self.replay.holds_out(span):
                self.training_tokens += span.anchors
                seen(span)
        return bool(taken)

    def reload(self, inbox: Inbox, seen: Callable[[Span], None], *, count: bool) -> None:
        """Fill the replay from the journal. ``count``: as new, for want of a checkpoint's counters."""
        for trace, frames in self._journal.read():
            try:
                self._check(trace)
                span = self._span(trace, frames)
            except RecordError as error:
                inbox.reject(error.reason)
                continue
            if self.replay.add(span) and count:
                self.received += 1
                if not self.replay.holds_out(span):
                    self.training_tokens += span.anchors
                    seen(span)

    def close(self) -> None:
        self._journal.close()

    def _keep(self, frames: Sequence[Frame], inbox: Inbox) -> None:
        try:
            self._journal.append(frames)
        except OSError as error:
            inbox.reject("journal_unwritable")
            log.error(
                "the replay cannot be written to disk; learning goes on from memory",
                reason=error.strerror,
            )

    def _check(self, trace: VerifyTrace) -> None:
        """Raises RecordError for a trace of another target version, or without a prompt's hash."""
        if PROMPT_HASH.fullmatch(trace.prompt_hash) is None:
            raise RecordError("malformed", f"prompt hash {trace.prompt_hash!r}")
        if trace.target_version != self.target_version:
            raise RecordError(
                "target_version", f"{trace.target_version}, not {self.target_version}"
            )

    def _span(self, trace: VerifyTrace, frames: Sequence[Frame]) -> Span:
        """Raises RecordError for a span that does not fit the target, or is not finite."""
        span = Span.from_trace(trace, frames)
        span.check(
            vocab_size=self._target.vocab_size,
            hidden_size=self._target.hidden_size,
            aux_size=3 * self._target.hidden_size if self._needs_aux else None,
        )
        for tensor in (span.aux, span.last):
            if tensor is not None and not torch.isfinite(tensor.float().abs().sum()):
                raise RecordError("not_finite", "hidden states hold NaN or infinity")
        if torch.isinf(span.lse).any():
            raise RecordError("not_finite", "logsumexp holds infinity")
        return span
