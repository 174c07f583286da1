"""The live version's time on trial: its watch, and the one order to go back that can come of it."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from learner.batch import Span
from learner.live import LiveDraft
from learner.shadow import shadow
from learner.target import Target
from learner.watch import Watch
from rlcore.log import get_logger
from rlcore.records.learner_link import Retreat

log = get_logger("learner")


class Trial:
    """Begins when a version goes live and ends with the next one that does.

    ``before`` is the version to compare it with; None for one that is not on trial. A version that
    was gone back to is the last good one and never is: one event leads to one retreat.
    """

    def __init__(self, live: LiveDraft, before: LiveDraft | None, steps: int) -> None:
        self._live = live
        self._before = before
        self._steps = steps
        self._watch = None if before is None else Watch(live.version, before.version)
        self._order: Retreat | None = None
        self._goal: str | None = None
        """Digest of the version that the order names."""
        self._left = False
        """The server serves another version, though its weights may not be here yet."""

    @property
    def failed(self) -> bool:
        """The version was found worse, and what follows it is not here yet."""
        return self._order is not None

    def observe(self, span: Span) -> None:
        """One span's steps, as the live version took them and as its predecessor would have."""
        watch, before = self._watch, self._before
        if watch is None or before is None:
            return
        pair = shadow(self._live.drafter, before.drafter, span, self._live.version, self._steps)
        if pair is None:
            return
        result = watch.observe(span.tenant, span.request_id, pair.tokens, pair.live, pair.other)
        if result.decision == "continue":
            return
        log.info("the watch over the live version ends", **asdict(result))
        if result.decision == "roll_back":
            self._order = Retreat(self._live.version, before.version, result.reason)
            self._goal = before.sha256
        self._watch = self._before = None

    def retarget(self, target: Target) -> None:
        """The target has new weights; both versions drafted and are replayed with them from now on."""
        for version in (self._live, self._before):
            if version is not None:
                version.drafter.retarget(target)

    def order(self) -> Retreat | None:
        """The order to go back, until the server has left the version."""
        return None if self._left else self._order

    def serves(self, version: int) -> None:
        """What a server says is live: once it has left the version, the order is not given again."""
        if self._order is None:
            return
        if version != self._live.version:
            self._left = True
        elif self._left:
            self.refused()  # somebody chose the version again

    def refused(self) -> None:
        """The server cannot go back: the version is learned on from, whatever it is."""
        self._order = self._goal = None

    def leads_to(self, live: LiveDraft) -> bool:
        """Whether this version is live because the order was followed."""
        return (
            self._order is not None and self._order.to == live.version and self._goal == live.sha256
        )

    # --- through a restart ---

    def state(self) -> list[Any]:
        """[digest, predecessor's digest, the watch's state] of the version that is to be live."""
        live = self._live.sha256 if self._goal is None else self._goal
        if self._watch is None or self._before is None:
            return [live, None, None]
        return [live, self._before.sha256, self._watch.state()]

    def resume(self, saved: list[Any] | None) -> None:
        """Go on with a watch over the same two versions, or with none where it had ended."""
        if saved is None or saved[0] != self._live.sha256:
            return
        _, before, state = saved
        if state is None:
            self._watch = self._before = None
        elif self._watch is not None and self._before is not None and before == self._before.sha256:
            self._watch.load_state(state)
