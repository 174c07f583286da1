"""Chooses the number of drafts in each step, so that tokens per second are most."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from rlcore.speculation.acceptance import Acceptance
from rlcore.speculation.cost import StepCost, bucket

FIRST_GUESS = 0.6
"""Acceptance of a draft where nothing is known of its drafter."""

SWITCH_GAIN = 1.03
"""A number of drafts gives way to another that is this many times better, not to one just better."""

OPTIMISM = 0.5
"""A number of drafts never tried is taken to cost this share of the step from the one before it to
the one before that. Too little rather than too much, or it would never be tried."""

EXPLORED_SHARE = 0.01
"""Share of the time that may be lost by trying what seems worse."""

SAVED_STEPS = 20
"""Steps whose time can be saved up. Any look can be afforded then, whatever it is expected to lose."""

MOST_TRIES = 50
"""Steps in which a number of drafts may be used in the hope that it pays, with no measurement of it."""

PROBE_STEPS = 4
"""Steps of a probe. The first verifies what was drafted before it, so it measures no cost."""

RECHECK_STEPS = 200
"""Steps after which another number of drafts is worth a look again."""

VERIFY_SHARE = 0.5
"""Share of what a further draft costs that is saved when one request does not verify it. The rest is
the drafter's pass, which runs for the whole batch."""


class DraftControl:
    """``observe_step`` and ``observe_drafts`` in, ``choose`` and ``limit`` out.

    The number of drafts that maximises sum over requests of (1 + sum_j P(first j accepted)), divided
    by the measured seconds of such a step. A batch size never seen begins without drafts, which is
    never slower than no speculation by more than the drafter's upkeep, and tries more one at a time.
    """

    def __init__(self, most_drafts: int, rates: Sequence[float]) -> None:
        """``rates``: conditional acceptance by position expected of the drafter, where known."""
        self.most = most_drafts
        self.cost = StepCost()
        self.acceptance = Acceptance(self._guesses(rates))
        self._chosen: dict[int, int] = {}
        """Bucket of the batch size -> number of drafts in use."""
        self._looked: dict[tuple[int, int], int] = {}
        """(bucket, drafts) -> step of the last look at it."""
        self._step = 0
        self._savings = 0.0
        self._longest = 0.0
        """Seconds that can be saved up."""
        self._tries: dict[tuple[int, int], int] = {}
        """(bucket, drafts) -> steps in which it was chosen without a measurement."""
        self._probe: tuple[int, int, int] | None = None
        """(bucket, drafts, steps left)"""

    def _guesses(self, rates: Sequence[float]) -> list[float]:
        known = list(rates[: self.most])
        return known + [FIRST_GUESS] * (self.most - len(known))

    def new_drafter(self, rates: Sequence[float]) -> None:
        """Another version proposes from now on. ``rates`` as at the start."""
        self.acceptance.restart(self._guesses(rates))
        self._looked.clear()
        self._tries.clear()

    def observe_step(self, batch: int, drafts: int | None, seconds: float) -> None:
        """A step with ``batch`` decoding requests, each of which verified and proposed ``drafts``.

        ``drafts`` is None for one that did other things too and says nothing of a cost.
        """
        if drafts is not None:
            self.cost.observe(batch, drafts, seconds)
        if 0 < seconds < math.inf:
            usual = self.cost.seconds(batch, drafts or 0) or seconds
            self._longest = SAVED_STEPS * usual
            saved = self._savings + EXPLORED_SHARE * min(seconds, 2 * usual)
            self._savings = min(self._longest, saved)

    def observe_drafts(self, request: str, drafted: int, accepted: int) -> None:
        self.acceptance.observe(request, drafted, accepted)

    def finished(self, requests: Iterable[str]) -> None:
        self.acceptance.forget(requests)

    def choose(self, requests: Sequence[str]) -> int:
        """How many tokens to draft for the next step of these requests."""
        if not requests:
            return 0
        self._step += 1
        size, kind = len(requests), bucket(len(requests))
        probed = self._probing(kind)
        if probed is not None:
            return probed
        drafts = self._best(requests, size, kind)
        self._chosen[kind] = drafts
        self._looked[kind, drafts] = self._step
        if not self.cost.measured(size, drafts):
            self._tries[kind, drafts] = self._tries.get((kind, drafts), 0) + 1
        return self._sound(requests, size, kind, drafts)

    def limit(self, request: str, drafts: int, batch: int) -> int:
        """How many of its ``drafts`` drafts a request should have verified in a batch of ``batch``."""
        if batch < 2 or drafts < 1 or self._probe is not None:
            return drafts
        now, before = self.cost.seconds(batch, drafts), self.cost.seconds(batch, drafts - 1)
        if now is None or before is None:
            return drafts
        chances = self.acceptance.chances(drafts)
        tokens_per_second = batch * (1 + sum(chances)) / now
        price = VERIFY_SHARE * max(0.0, now - before) / batch * tokens_per_second
        skill = self.acceptance.skill(request)
        # One is left, or nothing more would be learned of the request.
        while drafts > 1 and skill * chances[drafts - 1] < price:
            drafts -= 1
        return drafts

    # --- the choice ---

    def _best(self, requests: Sequence[str], size: int, kind: int) -> int:
        plain = self.cost.seconds(size, 0)
        if plain is None:
            return 0
        chances = self.acceptance.chances(self.most)
        skill = sum(self.acceptance.skill(request) for request in requests) / size
        tokens = 1.0
        values = {0: tokens / plain}
        costs = [plain]
        hopeful = False
        for drafts in range(1, self.most + 1):
            tokens += min(1.0, skill * chances[drafts - 1])
            measured = self.cost.seconds(size, drafts)
            costs.append(measured or self._hoped(costs))
            if measured is None:
                # Those behind it that were not measured either wait until this one is.
                tried = self._tries.get((kind, drafts), 0)
                if hopeful or tried >= MOST_TRIES:
                    continue
                hopeful = True
            values[drafts] = tokens / costs[-1]
        best = max(values, key=values.__getitem__)
        held = self._chosen.get(kind, 0)
        if held not in values or values[best] > SWITCH_GAIN * values[held]:
            return best
        return held

    def _hoped(self, costs: Sequence[float]) -> float:
        if len(costs) < 2:
            return costs[-1]
        return costs[-1] + OPTIMISM * max(0.0, costs[-1] - costs[-2])

    # --- looking at what is not in use ---

    def _probing(self, kind: int) -> int | None:
        if self._probe is None:
            return None
        probed, drafts, left = self._probe
        self._probe = (probed, drafts, left - 1) if left > 1 and probed == kind else None
        return drafts if probed == kind else None

    def _sound(self, requests: Sequence[str], size: int, kind: int, drafts: int) -> int:
        """``drafts``, or another number to be tried for some steps because its turn has come."""
        now = self.cost.seconds(size, drafts)
        if now is None:
            return drafts
        for other in self._others(drafts):
            if self._step - self._looked.get((kind, other), -RECHECK_STEPS) < RECHECK_STEPS:
                continue
            price = self._loss(size, drafts, other, now)
            if price > self._savings and self._savings < self._longest:
                continue
            self._savings = max(0.0, self._savings - price)
            self._looked[kind, other] = self._step
            self._probe = (kind, other, PROBE_STEPS - 1)
            if drafts == 0:
                self.acceptance.fade()
            return other
        return drafts

    def _others(self, drafts: int) -> list[int]:
        """Where nothing is drafted all positions are worth a look; elsewhere none, and the neighbours."""
        if drafts == 0:
            return [self.most, 1]
        near = [other for other in (drafts + 1, drafts - 1) if 0 < other <= self.most]
        return [*near, 0]

    def _loss(self, size: int, drafts: int, other: int, now: float) -> float:
        """Seconds that a probe is expected to lose."""
        theirs = self.cost.seconds(size, other)
        if theirs is None:
            theirs = now * (1 + max(0, other - drafts) * 0.5)
        elif other < drafts:
            theirs = min(theirs, now)  # a cost above this is one of slower days: worth a look
        chances = [1.0, *self.acceptance.chances(self.most)]
        mine, its = sum(chances[: drafts + 1]), sum(chances[: other + 1])
        return PROBE_STEPS * max(0.0, theirs - now * its / mine)
