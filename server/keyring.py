"""The keys file as it is now: read again when it changes, and kept as it was when it breaks."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from rlcore.log import get_logger
from server.keys import KeyEntry, Keys, KeysError, TenantRules, read_keys

log = get_logger("server")

LOOK_EVERY_S = 1.0
"""How old what is known of the file may be: a key that is taken out works no longer than this."""


class KeyRing:
    """Raises KeysError when the file cannot be used at the start. ``clock``: seconds, monotonic."""

    def __init__(self, path: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self._path = path
        self._clock = clock
        self._looked = clock()
        self._stamp = self._mark()
        self.keys = Keys()
        self._by_digest: dict[bytes, KeyEntry] = {}
        self.on_change: list[Callable[[], None]] = []
        self._take(read_keys(path))

    def find(self, digest: bytes) -> KeyEntry | None:
        """The entry of the key with this SHA-256 digest."""
        self.refresh()
        return self._by_digest.get(digest)

    def rules(self, tenant: str) -> TenantRules:
        """As the file has them now, whichever key it was that came."""
        self.refresh()
        return self.keys.rules(tenant)

    def refresh(self) -> None:
        """Look whether the file has changed, if that was not done just now."""
        now = self._clock()
        if now - self._looked < LOOK_EVERY_S:
            return
        self._looked = now
        stamp = self._mark()
        if stamp == self._stamp:
            return
        self._stamp = stamp
        try:
            keys = read_keys(self._path)
        except KeysError as error:
            log.error("the keys stay as they were", reason=str(error))
            return
        self._take(keys)
        log.info("the keys file was read again", keys=len(keys.keys), tenants=len(keys.tenants))
        for changed in self.on_change:
            changed()

    def replay_shares(self) -> dict[str, float]:
        """By tenant, where it is limited: the most that it may be of what is learned from."""
        self.refresh()
        tenants = self.keys.tenants.items()
        return {name: rules.replay_share for name, rules in tenants if rules.replay_share < 1}

    def _take(self, keys: Keys) -> None:
        self.keys = keys
        self._by_digest = {bytes.fromhex(entry.sha256): entry for entry in keys.keys}

    def _mark(self) -> tuple[int, ...] | None:
        """What differs between two states of the file; None while there is none."""
        try:
            found = self._path.stat()
        except OSError:
            return None
        return (found.st_mtime_ns, found.st_ctime_ns, found.st_size, found.st_ino, found.st_mode)
