"""Chooses the number of drafts in each step, so that tokens per second are most."""

from __future__ import annotations

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

SAVED_AT_MOST = 0.5
"""Seconds of loss that can be saved up."""

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
        self._probe: tuple[int, int, int] | None = None
        """(bucket, drafts, steps left)"""

    def _guesses(self, rates: Sequence[float]) -> list[float]:
        known = list(rates[: self.most])
        return known + [FIRST_GUESS] * (self.most - len(known))

    def new_drafter(self, rates: Sequence[float]) -> None:
        """Another version proposes from now on. ``rates`` as at the start."""
        self.acceptance.restart(self._guesses(rates))
        self._looked.clear()

    def observe_step(self, batch: int, drafts: int, seconds: float) -> None:
        """A pure decode step that verified and proposed ``drafts`` for each of ``batch`` requests."""
        self.cost.observe(batch, drafts, seconds)
        if 0 < seconds < SAVED_AT_MOST:
            self._savings = min(SAVED_AT_MOST, self._savings + EXPLORED_SHARE * seconds)

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
        while drafts and skill * chances[drafts - 1] < price:
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
        values = [tokens / plain]
        costs = [plain]
        for drafts in range(1, self.most + 1):
            tokens += min(1.0, skill * chances[drafts - 1])
            measured = self.cost.seconds(size, drafts)
            costs.append(measured or self._hoped(costs))
            values.append(tokens / costs[-1])
            if measured is None:
                break  # what lies behind it waits until this one is measured
        best = max(range(len(values)), key=values.__getitem__)
        held = min(self._chosen.get(kind, 0), len(values) - 1)
        return best if values[best] > SWITCH_GAIN * values[held] else held

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
            if price is None or price > self._savings:
                continue
            self._savings -= price
            self._looked[kind, other] = self._step
            self._probe = (kind, other, PROBE_STEPS - 1)
            if drafts == 0:
                self.acceptance.fade()
            return other
        return drafts

    def _others(self, drafts: int) -> list[int]:
        """Where nothing is drafted all positions are worth a look, elsewhere the neighbours."""
        if drafts == 0:
            return [self.most, 1]
        return [other for other in (drafts + 1, drafts - 1) if 0 <= other <= self.most]

    def _loss(self, size: int, drafts: int, other: int, now: float) -> float | None:
        """Seconds lost by a probe; None where the other number cannot be judged yet."""
        theirs = self.cost.seconds(size, other)
        if theirs is None:
            theirs = now * (1 + max(0, other - drafts) * 0.5)
        chances = [1.0, *self.acceptance.chances(self.most)]
        mine, its = sum(chances[: drafts + 1]), sum(chances[: other + 1])
        return PROBE_STEPS * max(0.0, theirs - now * its / mine)
