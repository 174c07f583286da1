"""Whether a candidate may replace the live drafter: a paired test on held-out traffic, in slices.

Both are run over the same spans, which neither was trained on. Positions of one prompt hang together,
so all spans of a prompt are one unit: with d_i the difference of the summed lengths in unit i and n_i
its positions, the gain per position is the ratio sum w_i d_i / sum w_i n_i, and its standard error is
that of a ratio estimator (Cochran, Sampling Techniques, section 6.3). The weights w hold the largest
tenant at half. Recent spans decide. Every tenant, and old memory, may stop a candidate that harms it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

ONE_SIDED_95 = 1.645
"""Normal quantile of the 95 % bounds."""

FEWEST_SPANS = 8
"""Below this many units the normal approximation is not to be trusted."""

TENANT_CAP = 0.5
"""Largest share of the weight that one tenant has while the others are enough to be judged."""

SLICE_TOKENS = 400
"""Positions that a slice needs to be judged on its own; tenants with less are judged together."""

TOLERANCE = 0.05
"""Acceptance length that a slice may lose, beyond its error, without stopping the candidate."""

OLD_SHARE = 0.5
"""Old memory may also lose this share of what recent traffic gains: after a shift of traffic the old
kind is not served at present, and a drafter of fixed size cannot always hold both at once."""

LARGEST_SUM = 1e9
"""No span's lengths sum up to more; a score beyond it, or NaN, is broken."""

SMALL_TENANTS = "small tenants"

Age = Literal["recent", "old"]


@dataclass(frozen=True)
class SpanScore:
    """One drafter on one held-out span: summed acceptance length and number of positions."""

    length_sum: float
    positions: int
    tenant: str = "default"
    slice: Age = "recent"
    prompt: str | None = None
    """Spans of the same prompt are one unit; without it, each span is its own."""


@dataclass(frozen=True)
class SliceGain:
    """The comparison within one slice; lengths are per position."""

    name: str
    tokens: int
    units: int
    candidate_length: float
    live_length: float
    gain: float
    gain_lower: float
    gain_upper: float
    """One-sided 95 % bounds of the gain."""


@dataclass(frozen=True)
class Judgement:
    promote: bool
    candidate_length: float
    live_length: float
    gain_lower: float
    """95 % lower bound of the gain in acceptance length."""
    tokens: int
    """Recent held-out positions."""
    reason: str
    gain: float = 0.0
    slices: tuple[SliceGain, ...] = ()
    """Slices with enough traffic: tenants by name, and ``old``."""
    harms: bool = False
    """It is better as a whole, but one slice stops it."""
    compared: bool = False
    """There was enough to compare, and the scores were numbers."""


@dataclass
class _Unit:
    tenant: str
    positions: int = 0
    candidate: float = 0.0
    live: float = 0.0


def judge(
    candidate: Sequence[SpanScore],
    live: Sequence[SpanScore],
    fewest_tokens: int,
    least_gain: float = 0.0,
) -> Judgement:
    """Compare span by span; both sequences name the same spans in the same order.

    ``fewest_tokens`` recent positions are needed. The gain has to be real (its lower bound above
    0) and worth the swap (its estimate at least ``least_gain``, in acceptance length).
    """
    if any(_identity(c) != _identity(s) for c, s in zip(candidate, live, strict=True)):
        raise ValueError("the two score different spans")
    recent = _units(candidate, live, "recent")
    tokens = sum(unit.positions for unit in recent)
    broken = sum(not abs(s.length_sum) <= LARGEST_SUM for s in (*candidate, *live))
    if broken:
        return Judgement(False, 0.0, 0.0, 0.0, tokens, f"{broken} scores are not finite")
    if tokens < fewest_tokens or len(recent) < FEWEST_SPANS:
        return Judgement(False, 0.0, 0.0, 0.0, tokens, "too little held-out traffic")
    whole = _compare("recent", recent)
    slices = _slices(recent, _units(candidate, live, "old"))
    harm = _harm(whole, slices)
    reason = harm or _obstacle(whole, least_gain)
    return Judgement(
        promote=reason is None,
        candidate_length=whole.candidate_length,
        live_length=whole.live_length,
        gain_lower=whole.gain_lower,
        tokens=tokens,
        reason=reason or "better than the live version",
        gain=whole.gain,
        slices=slices,
        harms=harm is not None and whole.gain_lower > 0,
        compared=True,
    )


def capped_weights(tokens: Mapping[str, float]) -> dict[str, float]:
    """The weight of a position of each tenant, at most 1: the largest is held at ``TENANT_CAP``."""
    total = sum(tokens.values())
    weights = dict.fromkeys(tokens, 1.0)
    largest = max(tokens, key=lambda tenant: tokens[tenant])
    others = total - tokens[largest]
    if others > 0 and tokens[largest] > TENANT_CAP * total:
        weights[largest] = others * TENANT_CAP / (1 - TENANT_CAP) / tokens[largest]
    return weights


def _harm(whole: SliceGain, slices: Sequence[SliceGain]) -> str | None:
    """Which slice the candidate is worse for, if any."""
    for one in slices:
        tolerance = TOLERANCE
        if one.name == "old":
            tolerance = max(TOLERANCE, OLD_SHARE * whole.gain_lower)
        if one.gain_upper < -tolerance:
            return (
                f"worse for {one.name}: {one.candidate_length:.3f} against {one.live_length:.3f} "
                f"over {one.tokens} tokens"
            )
    return None


def _obstacle(whole: SliceGain, least_gain: float) -> str | None:
    """Why a candidate that harms nobody may not go live; None when nothing is in its way."""
    if whole.gain_lower <= 0:
        return "not shown to be better"
    if whole.gain < least_gain:
        return f"better by {whole.gain:.3f}, a swap costs {least_gain:.3f}"
    return None


def _identity(score: SpanScore) -> tuple[int, str, str, str | None]:
    return (score.positions, score.tenant, score.slice, score.prompt)


def _units(candidate: Sequence[SpanScore], live: Sequence[SpanScore], age: Age) -> list[_Unit]:
    """The units of one age that have positions."""
    units: dict[object, _Unit] = {}
    for i, (mine, theirs) in enumerate(zip(candidate, live, strict=True)):
        if theirs.slice != age or theirs.positions == 0:
            continue
        key = i if theirs.prompt is None else (theirs.tenant, theirs.prompt)
        unit = units.setdefault(key, _Unit(theirs.tenant))
        unit.positions += theirs.positions
        unit.candidate += mine.length_sum
        unit.live += theirs.length_sum
    return list(units.values())


def _slices(recent: Sequence[_Unit], old: Sequence[_Unit]) -> tuple[SliceGain, ...]:
    by_tenant: dict[str, list[_Unit]] = {}
    for unit in recent:
        by_tenant.setdefault(unit.tenant, []).append(unit)
    named = [(f"tenant {t}", u) for t, u in by_tenant.items() if _is_enough(u)]
    small = [unit for units in by_tenant.values() if not _is_enough(units) for unit in units]
    named += [(SMALL_TENANTS, small), ("old", list(old))]
    return tuple(_compare(name, units) for name, units in named if _is_enough(units))


def _is_enough(units: Sequence[_Unit]) -> bool:
    return len(units) >= FEWEST_SPANS and _tokens(units) >= SLICE_TOKENS


def _tokens(units: Iterable[_Unit]) -> int:
    return sum(unit.positions for unit in units)


def _compare(name: str, units: Sequence[_Unit]) -> SliceGain:
    """The capped-weighted comparison over these units, of which there are at least two."""
    tokens: dict[str, float] = {}
    for unit in units:
        tokens[unit.tenant] = tokens.get(unit.tenant, 0.0) + unit.positions
    largest = max(tokens, key=lambda tenant: tokens[tenant])
    weights = dict.fromkeys(tokens, 1.0)
    if _is_enough([unit for unit in units if unit.tenant != largest]):
        weights = capped_weights(tokens)
    sizes = [weights[unit.tenant] * unit.positions for unit in units]
    size = math.fsum(sizes)
    candidate = math.fsum(weights[u.tenant] * u.candidate for u in units) / size
    live = math.fsum(weights[u.tenant] * u.live for u in units) / size
    gain = math.fsum(weights[u.tenant] * (u.candidate - u.live) for u in units) / size
    spread = math.fsum(
        (weights[u.tenant] * (u.candidate - u.live - gain * u.positions)) ** 2 for u in units
    )
    squares = [s**2 for s in sizes]
    effective = math.fsum(squares) ** 2 / math.fsum(q**2 for q in squares)
    """Units that the variance rests on (Satterthwaite, equal spread in each)."""
    freedom = max(1.0, effective - 1)
    error = math.sqrt(spread * (freedom + 1) / freedom) / size
    # Student's quantile from the normal one (Cornish-Fisher, first term).
    reach = (ONE_SIDED_95 + (ONE_SIDED_95**3 + ONE_SIDED_95) / (4 * freedom)) * error
    return SliceGain(
        name, _tokens(units), len(units), candidate, live, gain, gain - reach, gain + reach
    )
