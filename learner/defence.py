"""Checks of a span's hidden states: are they the target's own, and of a size that it produces?

Three checks, cheap ones first; each refusal is a RecordError whose reason is counted, none is fatal.

1. Fixed bounds, which hold from the first span on. After an RMS norm with weight w no row's RMS is
   above max|w|. A residual stream is compared with the embedding it starts from, very broadly.
2. The logsumexp that the engine computed must follow from the last hidden state and the target's head
   (on a few rows). States that were made up, damaged, or taken from another model do not pass.
3. A range learned from the stream: the typical row of a span has about the size of other spans' rows.
   Single rows may be far outside: the first token of a sequence is an attention sink, a thousand
   times larger than the rest; many may not.
"""

from __future__ import annotations

import math
import random
from collections import deque

import torch
from torch import Tensor

from learner.batch import Span
from learner.target import Target
from rlcore.precision import bfloat16_is_fast
from rlcore.records.wire import RecordError

NORM_MARGIN = 1.1
"""On the bound of the last hidden state: rounding, and weights that are applied as 1 + w."""

SMALLEST = 1e-2
"""The size of a typical row, as a multiple of the final norm's or of the embedding's."""

LARGEST_VALUE = 1e7
"""Any value in a residual stream, as a multiple of the embedding's RMS."""

CHECKED_ROWS = 3
"""Rows of a span whose logsumexp is computed again."""

LSE_TOLERANCE, LSE_ROUNDING = 0.25, 2**-7
"""Allowed difference, absolute and as a share of the logsumexp: bfloat16 logits are rounded to 2^-9."""

WINDOW_SPANS = 256
"""Spans that the learned range is about."""

FEWEST_SPANS = 16
"""Before so many were seen, only the fixed bounds hold."""

MAD_MULTIPLE = 8.0
"""Distance from the median, in median absolute deviations scaled to a standard deviation."""

ALWAYS_ALLOWED = math.log(3.0)
"""No span is refused for a typical row within a factor of three of the median."""

OUTLIER = 16.0
"""A row is an outlier when it is so many times larger than the span's typical one."""

OUTLIERS = 2, 0.02
"""Outlier rows that a span may have, and as a share of its rows."""


class LearnedRange:
    """Where a positive quantity normally lies: its median and median absolute deviation, as logarithms.

    Everything observed counts, refused or not, so that a range learned from a bad start does not
    lock out the good: the majority of the window decides.
    """

    def __init__(self) -> None:
        self._logs: deque[float] = deque(maxlen=WINDOW_SPANS)

    def observe(self, value: float) -> bool:
        """Whether the value is within the range of those before it."""
        log = math.log(value)
        inside = len(self._logs) < FEWEST_SPANS or self._holds(log)
        self._logs.append(log)
        return inside

    def _holds(self, log: float) -> bool:
        middle = _median(self._logs)
        spread = 1.4826 * _median([abs(x - middle) for x in self._logs])
        return abs(log - middle) <= max(ALWAYS_ALLOWED, MAD_MULTIPLE * spread)

    def state(self) -> list[float]:
        return list(self._logs)

    def load_state(self, state: list[float]) -> None:
        self._logs = deque(state, maxlen=WINDOW_SPANS)


def _median(values: deque[float] | list[float]) -> float:
    return sorted(values)[len(values) // 2]


class Defence:
    """One target's checks; each raises RecordError."""

    def __init__(self, target: Target, seed: int) -> None:
        self._target = target
        self._seed = seed
        self._embedding_rms = float(target.embedding.square().mean().sqrt())
        self._norm_rms = float(target.final_norm.square().mean().sqrt())
        self._norm_max = float(target.final_norm.abs().max())
        self._ranges: dict[str, LearnedRange] = {}
        self._bfloat16_head: Tensor | None = None

    def check(self, span: Span) -> None:
        """All checks of a span that has just come in."""
        typical = self.check_bounds(span)
        self._check_logsumexp(span)
        outside = [
            name
            for name, size in typical.items()
            if not self._ranges.setdefault(name, LearnedRange()).observe(size)
        ]
        if outside:
            raise RecordError("extreme", f"rows of an unheard-of size in {', '.join(outside)}")

    def check_bounds(self, span: Span) -> dict[str, float]:
        """What holds whatever came before; the size of the typical row of each tensor."""
        if torch.isinf(span.lse).any():
            raise RecordError("not_finite", "logsumexp holds infinity")
        largest_row = NORM_MARGIN * (1.0 + self._norm_max)
        sizes = _sizes("last", span.last, largest_row * math.sqrt(span.last.shape[1]))
        if float(sizes.max()) > largest_row:
            raise RecordError("extreme", "last: a row larger than the final norm can give")
        typical = {"last": float(sizes.median())}
        floors = {"last": SMALLEST * self._norm_rms}
        if span.aux is not None:
            for i, part in enumerate(span.aux.split(self._target.hidden_size, dim=1)):
                name = f"aux{i}"
                sizes = _sizes(name, part, LARGEST_VALUE * self._embedding_rms)
                typical[name] = float(sizes.median())
                floors[name] = SMALLEST * self._embedding_rms
                outliers = int((sizes > OUTLIER * typical[name]).sum())
                if outliers > max(OUTLIERS[0], OUTLIERS[1] * span.rows):
                    raise RecordError("extreme", f"{name}: {outliers} rows far above the others")
        for name, floor in floors.items():
            if typical[name] < floor:
                raise RecordError("extreme", f"{name}: rows of size {typical[name]:.3g}")
        return typical

    def _check_logsumexp(self, span: Span) -> None:
        """Of some rows, the same ones for the same span."""
        known = torch.nonzero(~span.lse.isnan()).flatten().tolist()
        if not known:
            raise RecordError("logsumexp", "no row has one")
        draw = random.Random(f"{self._seed} {span.request_id} {span.first_position}")
        rows = draw.sample(known, min(CHECKED_ROWS, len(known)))
        states = span.last[rows]
        head = self._head(states.dtype)
        found = torch.logsumexp((head @ states.to(head.dtype).T).float(), dim=0)
        given = span.lse[rows]
        if ((found - given).abs() > LSE_TOLERANCE + LSE_ROUNDING * found.abs()).any():
            raise RecordError("logsumexp", f"{given.tolist()} given, {found.tolist()} computed")

    def _head(self, dtype: torch.dtype) -> Tensor:
        if dtype is not torch.bfloat16 or not bfloat16_is_fast():
            return self._target.lm_head
        if self._bfloat16_head is None:
            self._bfloat16_head = self._target.lm_head.bfloat16()
        return self._bfloat16_head

    def state(self) -> dict[str, list[float]]:
        return {name: learned.state() for name, learned in self._ranges.items()}

    def load_state(self, state: dict[str, list[float]]) -> None:
        for name, logs in state.items():
            self._ranges.setdefault(name, LearnedRange()).load_state(logs)


def _sizes(name: str, tensor: Tensor, largest_value: float) -> Tensor:
    """The RMS of each row; RecordError when a value is not finite or above the bound."""
    largest = float(tensor.abs().max())
    if not math.isfinite(largest):
        raise RecordError("not_finite", f"{name} holds NaN or infinity")
    if largest > largest_value:
        raise RecordError("extreme", f"{name} holds {largest:.3g}")
    return torch.linalg.vector_norm(tensor, dim=1, dtype=torch.float32) / tensor.shape[1] ** 0.5
