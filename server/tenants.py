"""One reading of what is known of a tenant."""

from __future__ import annotations

from typing import Any

import msgspec

from server.keys import TenantRules
from server.purges import Purges
from server.status import ServerState


def tenant_names(state: ServerState) -> list[str]:
    """Tenants with rules, and those that were served since the start."""
    ring = state.gate.ring
    known = set() if ring is None else set(ring.keys.tenants)
    return sorted(known | state.served().keys())


def tenant_view(state: ServerState, purges: Purges, tenant: str) -> dict[str, Any]:
    """``tokens`` are those given to clients since the engine started."""
    ring = state.gate.ring
    served = state.served().get(tenant)
    return {
        "tenant": tenant,
        "rules": msgspec.to_builtins(TenantRules() if ring is None else ring.keys.rules(tenant)),
        "served": {} if served is None else msgspec.to_builtins(served),
        "running": state.quotas.running(tenant),
        "refused": state.quotas.refused(tenant),
        "purge_open": any(purge.tenant == tenant for purge in purges.pending),
    }
