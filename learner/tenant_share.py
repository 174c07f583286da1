"""How much of one tenant's traffic is learned from when it sends many times what the others do.

A pure state machine over (tenant, tokens). It forgets by tokens, not by time: a pause changes nothing.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

HORIZON_TOKENS = 20_000
"""Tokens of all tenants after which a token counts 1/e."""

TIMES_THE_OTHERS = 2.0
"""A tenant may bring this many times what all others together do."""

ALWAYS = 0.25
"""Share of the horizon that a tenant may bring in any case: what most of the traffic is about must be
learned from, even where the others send next to nothing."""

ALONE = 0.02
"""While the others' share of the traffic is below this, the tenant is treated as the only one."""

FORGOTTEN_TOKENS = 1.0
"""A tenant with fewer remembered tokens is forgotten."""


class TenantShare:
    def __init__(self) -> None:
        self._offered: dict[str, float] = {}
        self._taken: dict[str, float] = {}
        self.most: Mapping[str, float] = {}
        """Of what is learned from, the most that single tenants may be, where an operator has set it.
        Such a tenant is not learned from while nobody else sends anything."""

    def observe(self, tenant: str, tokens: int) -> bool:
        """Whether these tokens may be learned from."""
        self._forget(tokens)
        self._offered[tenant] = self._offered.get(tenant, 0.0) + tokens
        total = sum(self._offered.values())
        others = total - self._offered[tenant]
        if others >= ALONE * total:
            allowed = max(TIMES_THE_OTHERS * others, ALWAYS * HORIZON_TOKENS)
            if self._taken.get(tenant, 0.0) + tokens > allowed:
                return False
        most = self.most.get(tenant, 1.0)
        if most < 1 and self._taken.get(tenant, 0.0) + tokens > most / (1 - most) * others:
            return False
        self._taken[tenant] = self._taken.get(tenant, 0.0) + tokens
        return True

    def forget(self, tenant: str) -> None:
        """Keep nothing of a tenant."""
        self._offered.pop(tenant, None)
        self._taken.pop(tenant, None)

    def _forget(self, tokens: int) -> None:
        keep = math.exp(-tokens / HORIZON_TOKENS)
        for counts in (self._offered, self._taken):
            for tenant, count in list(counts.items()):
                counts[tenant] = count * keep
                if counts[tenant] < FORGOTTEN_TOKENS:
                    del counts[tenant]

    def state(self) -> dict[str, Any]:
        return {"offered": self._offered, "taken": self._taken}

    def load_state(self, state: dict[str, Any]) -> None:
        self._offered = dict(state["offered"])
        self._taken = dict(state["taken"])
