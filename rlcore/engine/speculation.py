"""How many tokens to draft in a step: a pure state machine.

A trained drafter drafts K tokens in every step. An untrained one cannot pay, so it drafts nothing
except for a probe of K tokens in one step out of ``probe_interval``: enough to show live acceptance
from the first minute, at almost no cost. The drafter still runs its one pass a step (vLLM's warm
K=0), so its KV cache is whole when drafting starts.
"""

from __future__ import annotations


class DraftLength:
    """``observe`` nothing but the passing of steps; ``next()`` gives K for the step at hand."""

    def __init__(self, speculative_tokens: int, probe_interval: int, trained: bool) -> None:
        self.speculative_tokens = speculative_tokens
        self.probe_interval = probe_interval
        self.trained = trained
        self._steps = 0

    def next(self) -> int:
        self._steps += 1
        if self.trained or self._steps % self.probe_interval == 0:
            return self.speculative_tokens
        return 0
