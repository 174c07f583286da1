"""What keeps tenants apart inside the engine: the salt of their cached blocks, the rank of their requests.

vLLM reuses a cached block only for a request with the same ``cache_salt`` on its first block. A client can
send a salt of its own; it is hashed together with the tenant under a key that never leaves this process,
so it divides the tenant's own cache further and reaches no other tenant's.
"""

from __future__ import annotations

import hashlib
import secrets

_KEY = secrets.token_bytes(32)

OWN_RANKS = 1_000_000
"""Priorities that a client can tell its own requests apart by, within its tenant's."""


def tenant_salt(tenant: str, own: str | None) -> str:
    """The ``cache_salt`` of a request; ``own`` is what its body asked for."""
    digest = hashlib.blake2b(key=_KEY, digest_size=24)
    for part in (tenant, "none" if own is None else f"own {own}"):
        text = part.encode(errors="surrogatepass")
        digest.update(len(text).to_bytes(8, "big") + text)
    return digest.hexdigest()


def ranked(priority: int, own: int) -> int:
    """vLLM's priority: the tenant's first, and among its own requests what their bodies asked for."""
    half = OWN_RANKS // 2
    return priority * OWN_RANKS + max(-half, min(half - 1, own))
