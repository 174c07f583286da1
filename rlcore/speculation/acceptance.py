"""What drafts return at present: acceptance by position, of all traffic and of each request."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

MEMORY = 200.0
"""Trials that the traffic's rate of a position remembers."""

OWN_MEMORY = 16.0
"""Steps that a request's own score remembers."""

OWN_PRIOR = 6.0
"""Expected acceptances that a request's own score is worth before it has any: by so much the traffic's
rates stand against the request's own record."""

GUESS_TRIALS = 4.0
"""Trials that a guess is worth."""

FADED_TRIALS = 12.0
"""Trials that old knowledge is worth once it is doubted."""


class _Rate:
    """A share of successes that begins with a guess; the far past is forgotten."""

    def __init__(self, guess: float) -> None:
        self.trials = GUESS_TRIALS
        self.hits = GUESS_TRIALS * guess

    def observe(self, hit: bool) -> None:
        keep = 1 - 1 / MEMORY
        self.trials = self.trials * keep + 1
        self.hits = self.hits * keep + hit

    def fade(self) -> None:
        """Keep the value, and let the next trials weigh more."""
        if self.trials > FADED_TRIALS:
            self.hits *= FADED_TRIALS / self.trials
            self.trials = FADED_TRIALS

    @property
    def value(self) -> float:
        return self.hits / self.trials


class _Own:
    """A request's acceptances beside those that the traffic's rates foretold."""

    def __init__(self) -> None:
        self.accepted = 0.0
        self.expected = 0.0

    def observe(self, accepted: int, expected: float) -> None:
        keep = 1 - 1 / OWN_MEMORY
        self.accepted = self.accepted * keep + accepted
        self.expected = self.expected * keep + expected

    @property
    def skill(self) -> float:
        return (self.accepted + OWN_PRIOR) / (self.expected + OWN_PRIOR)


class Acceptance:
    """``observe`` every verified draft; ask for the chance that the first j drafts are accepted.

    The j-th draft counts only where the j - 1 before it were accepted, so the rates are conditional
    and do not depend on how many were drafted.
    """

    def __init__(self, guesses: Sequence[float]) -> None:
        """``guesses``: conditional acceptance by position, before anything was seen."""
        self._rates = [_Rate(guess) for guess in guesses]
        self._own: dict[str, _Own] = {}

    def restart(self, guesses: Sequence[float]) -> None:
        """Another drafter is at work: what was seen of the old one says little of it."""
        self._rates = [_Rate(guess) for guess in guesses]
        self._own.clear()

    def fade(self) -> None:
        """Nothing was drafted for a while: what is known may have become untrue."""
        for rate in self._rates:
            rate.fade()

    def observe(self, request: str, drafted: int, accepted: int) -> None:
        """A step verified ``drafted`` drafts of a request and kept the first ``accepted``."""
        drafted = min(drafted, len(self._rates))
        if drafted < 1:
            return
        accepted = min(accepted, drafted)
        own = self._own.setdefault(request, _Own())
        own.observe(accepted, sum(self.chances(drafted)))
        for position in range(min(accepted + 1, drafted)):
            self._rates[position].observe(position < accepted)

    def forget(self, requests: Iterable[str]) -> None:
        for request in requests:
            self._own.pop(request, None)

    def chances(self, drafts: int) -> list[float]:
        """Of the traffic: the chance that the first j drafts are all accepted, j = 1 .. drafts."""
        found, survival = [], 1.0
        for rate in self._rates[:drafts]:
            survival *= rate.value
            found.append(survival)
        return found

    def skill(self, request: str) -> float:
        """Acceptances of a request by those of the traffic; 1 for one that has no record."""
        own = self._own.get(request)
        return 1.0 if own is None else own.skill
