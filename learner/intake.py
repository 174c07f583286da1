"""From a trace message to the replay: checked against the target, kept in memory and on disk."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from learner.batch import Span
from learner.cutoffs import Cutoffs
from learner.defence import Defence
from learner.inbox import Inbox
from learner.journal import Journal, Mark
from learner.replay import Replay
from learner.split import HeldoutSplit
from learner.strata import SpanKey, span_key
from learner.target import Target
from learner.tenant_share import TenantShare
from rlcore.log import get_logger
from rlcore.records.learner_link import PurgeCounts
from rlcore.records.trace import VerifyTrace
from rlcore.records.wire import RecordError
from rlcore.settings import DrafterSettings
from rlcore.transport import Frame

log = get_logger("learner")

HELDOUT_MARGIN = 1.3
"""Held-out tokens gathered early, over those the gate needs: the last of each span are not judged."""

JOURNAL_FACTOR = 2
"""The journal's budget over the replay's: it holds what was evicted too, until its segment goes."""

PROMPT_HASH = re.compile("[0-9a-f]{32}")
"""What the capture writes; the held-out split reads it as a number."""


class Intake:
    """Owns the replay and its journal; ``folder`` None keeps nothing on disk."""

    def __init__(self, settings: DrafterSettings, folder: Path | None, target: Target) -> None:
        self._target = target
        self._settings = settings
        self._budget = int(settings.replay_gib * 2**30)
        self._limits: dict[str, float] = {}
        self.replay = self._empty_replay()
        self._defence = Defence(target, settings.seed)
        self._share = TenantShare()
        self._journal: Journal | None = None
        if folder is not None:
            self._journal = Journal(folder / "replay", JOURNAL_FACTOR * self._budget, self._is_held)
        self._cutoffs = Cutoffs(None if folder is None else folder / "purges.json")
        self._loaded_end: Mark = (0, 0)
        """Up to where the journal is described by the loaded state."""
        self.aux_count = 0
        """Auxiliary layers whose states a span has to bring; those that the live drafter reads."""
        self.target_version = 0
        """Traces of another one are refused."""
        self.received = 0
        """Spans taken, in total."""
        self.training_tokens = 0
        """Output positions received that may be trained on, in total."""
        self.heldout_tokens = 0
        """Output positions received that are held out, in total."""

    def _empty_replay(self) -> Replay:
        settings = self._settings
        split = HeldoutSplit(settings.heldout_share, int(HELDOUT_MARGIN * settings.gate_tokens))
        replay = Replay(self._budget, split, settings.gate_tokens, settings.seed)
        replay.most_shares = self._limits
        return replay

    def retarget(self, target: Target, version: int) -> None:
        """Traces of this version of the target come now. The replay's states and distributions are
        another one's, so it starts anew; in the journal they stay until their segment goes."""
        self._target = target
        self.target_version = version
        self.replay = self._empty_replay()
        self._defence = Defence(target, self._settings.seed)

    def limit(self, shares: Mapping[str, float]) -> None:
        """Of what is learned from, the most that single tenants may be, from now on."""
        self._limits = dict(shares)
        self._share.most = self.replay.most_shares = self._limits

    def purge(self, tenant: str, until: float) -> PurgeCounts:
        """Delete everything of a tenant, and refuse what ended up to ``until`` and is still on its way.

        What was deleted, when it is off the disk. Raises OSError; asked again, it goes on.
        """
        self._cutoffs.add(tenant, until)
        training, heldout = self.replay.remove(lambda span: span.tenant == tenant)
        self._share.forget(tenant)
        journal = 0
        if self._journal is not None:
            journal = self._journal.delete(lambda trace: trace.tenant == tenant)
        return PurgeCounts(training, heldout, journal)

    def expire(self, before: float) -> int:
        """Delete what ended before then (seconds since the epoch); how many traces were on the disk.

        Raises OSError.
        """
        self.replay.remove(lambda span: span.ended < before)
        if self._journal is None:
            return 0
        return self._journal.expire(before)

    @property
    def aux_size(self) -> int:
        """Width of those states."""
        return self.aux_count * self._target.hidden_size

    def take(self, inbox: Inbox, seen: Callable[[Span], None]) -> bool:
        """Take what waits in the inbox; ``seen`` is called with each span that was taken.

        False when there was nothing.
        """
        taken = inbox.traces(self._check_header)
        for trace, frames in taken:
            try:
                span = self.put(trace, frames[1:])
            except RecordError as error:
                inbox.reject(error.reason)
                continue
            self._keep(frames, inbox)
            seen(span)
        return bool(taken)

    def put(self, trace: VerifyTrace, frames: Sequence[Frame]) -> Span:
        """Take one trace into the replay; ``frames`` are its tensors'.

        Raises RecordError when it is refused. What a tenant sends beyond its share is refused before
        its states are looked at; a span refused for its states has used up the share all the same.
        """
        self._check_header(trace)
        span = self._span(trace, frames)
        if span.anchors == 0 or self.replay.holds(span_key(span)):
            raise RecordError("nothing_new", "no position to draft from, or known already")
        if not self._share.observe(span.tenant, span.anchors):
            raise RecordError("tenant_share", f"{span.tenant!r} sends many times what others do")
        self._defence.check(span)
        if not self.replay.add(span):
            raise RecordError("no_room", f"{span.nbytes} bytes")
        self._count(span)
        return span

    def _count(self, span: Span) -> None:
        self.received += 1
        if self.replay.holds_out(span):
            self.heldout_tokens += span.anchors
        else:
            self.training_tokens += span.anchors

    def close(self) -> None:
        if self._journal is not None:
            self._journal.close()

    def _is_held(self, trace: VerifyTrace) -> bool:
        return self.replay.holds((trace.request_id, trace.first_position))

    def _keep(self, frames: Sequence[Frame], inbox: Inbox) -> None:
        if self._journal is None:
            return
        try:
            self._journal.append(frames)
        except OSError as error:
            inbox.reject("journal_unwritable")
            log.error(
                "the replay cannot be written to disk; learning goes on from memory",
                reason=error.strerror,
            )

    def _check_header(self, trace: VerifyTrace) -> None:
        """Raises RecordError for a trace of another target version, or without a prompt's hash."""
        if PROMPT_HASH.fullmatch(trace.prompt_hash) is None:
            raise RecordError("malformed", f"prompt hash {trace.prompt_hash!r}")
        if trace.target_version != self.target_version:
            raise RecordError(
                "target_version", f"{trace.target_version}, not {self.target_version}"
            )
        self._cutoffs.check(trace.tenant, trace.ended)

    def _span(self, trace: VerifyTrace, frames: Sequence[Frame]) -> Span:
        """Raises RecordError for a span that does not fit the target."""
        span = Span.from_trace(trace, frames)
        span.check(
            vocab_size=self._target.vocab_size,
            hidden_size=self._target.hidden_size,
            aux_size=self.aux_size or None,
        )
        return span

    # --- through a restart ---

    def state(self) -> dict[str, Any]:
        """Everything but the spans, which are in the journal."""
        return {
            "received": self.received,
            "training_tokens": self.training_tokens,
            "heldout_tokens": self.heldout_tokens,
            "replay": self.replay.state(),
            "share": self._share.state(),
            "defence": self._defence.state(),
            "journal_end": (0, 0) if self._journal is None else self._journal.end,
        }

    def load_state(self, state: dict[str, Any]) -> None:
        """Call before ``reload``, which then counts what came after this state."""
        self.received = state["received"]
        self.training_tokens = state["training_tokens"]
        self.heldout_tokens = state["heldout_tokens"]
        self.replay.load_state(state["replay"])
        self._share.load_state(state["share"])
        self._defence.load_state(state["defence"])
        segment, message = state["journal_end"]
        self._loaded_end = (segment, message)

    def reload(self, inbox: Inbox, seen: Callable[[Span], None]) -> None:
        """Fill the replay from the journal; its states were checked when they came.

        Spans of the loaded state take their old places. What came after that state is new, counted,
        and ``seen``; with no state to tell, everything is.
        """
        replay, end = self.replay, self._loaded_end
        saved: dict[SpanKey, Span] = {}
        for span in self._journaled(inbox, lambda _, key: replay.saved_clock(key) is not None):
            saved[span_key(span)] = span
        for key in sorted(saved, key=lambda key: replay.saved_clock(key) or 0):
            replay.add(saved[key])
        for span in self._journaled(inbox, lambda mark, key: mark >= end and not replay.holds(key)):
            if replay.add(span):
                self._count(span)
                seen(span)

    def _journaled(self, inbox: Inbox, wanted: Callable[[Mark, SpanKey], bool]) -> Iterator[Span]:
        if self._journal is None:
            return
        for mark, trace, frames in self._journal.read_marked():
            if not wanted(mark, (trace.request_id, trace.first_position)):
                continue
            try:
                self._check_header(trace)
                span = self._span(trace, frames)
                self._defence.check_bounds(span)
            except RecordError as error:
                inbox.reject(error.reason)
                continue
            yield span
