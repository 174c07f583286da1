"""Which draft version is live: checks, swaps, remembers, goes back.

One swap at a time. The live version is written down before clients can see it, so a restart serves
what was last promoted.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from rlcore.live_drafts import LIVE_FILE, DraftError, LiveDraft, expected_rates, read_live
from rlcore.log import get_logger
from rlcore.records.versions import DraftManifest
from rlcore.weights import (
    WEIGHTS,
    WeightError,
    WeightStore,
    check_signature,
    read_checked,
    signature,
)
from server.history import Cause, History

log = get_logger("server")

SWAP_DEADLINE = 60.0
"""Seconds the engine is given to answer; it answers between two steps."""

KEPT_VERSIONS = 16
"""Versions kept on disk beside the live and the previous one."""

Swap = Callable[[str, str, int, list[float]], Awaitable[dict[str, Any]]]
"""(folder, sha256, version, expected rates) -> the engine's SwapReport as plain values."""


@dataclass
class SwapStatistics:
    count: int = 0
    failed: dict[str, int] = field(default_factory=dict)
    seconds_sum: float = 0.0
    last_seconds: float | None = None


class Drafts:
    """The versions of one target's drafter, and which of them serves."""

    def __init__(self, store: WeightStore, target_id: str, method: str, state: LiveDraft) -> None:
        self.store = store
        self.target_id = target_id
        self.method = method
        self.live = state.live
        self.previous = state.previous
        self.statistics = SwapStatistics()
        self.history = History(store.root)
        self.on_change: list[Callable[[], None]] = []
        self._lock = asyncio.Lock()
        self._swap: Swap | None = None
        self._swapping: asyncio.Task[float] | None = None
        """The last swap that the present engine was asked for."""
        self._manifest = store.manifest(state.live)

    @classmethod
    def load(cls, store: WeightStore, target_id: str, method: str) -> Drafts | None:
        """As a server left them; None when nothing was ever live here."""
        state = read_live(store.root)
        if state is None or state.live not in store.versions():
            return None
        return cls(store, target_id, method, state)

    def connect(self, swap: Swap) -> None:
        """Give it the engine."""
        self._swap, self._swapping = swap, None

    def disconnect(self) -> None:
        """The engine is gone; until there is another one, nothing is swapped."""
        self._swap = None

    async def fall_back(self) -> None:
        """Before an engine starts: while the live version's files are damaged, an earlier one is live.

        Raises DraftError when no version is whole.
        """
        version, manifest = await asyncio.to_thread(self._newest_whole)
        if version == self.live:
            return
        damaged = self.live
        self.live, self.previous, self._manifest = version, None, manifest
        self._write_down()
        self.history.add(version, damaged, "rolled_back", "its files were damaged")
        log.error("an earlier draft is live", live=version)
        self._tell()

    def _newest_whole(self) -> tuple[int, DraftManifest]:
        """The live version if it is whole, else what was live before it, else the newest that is."""
        candidates = [self.live, self.previous, *reversed(self.store.versions())]
        for version in dict.fromkeys(v for v in candidates if v is not None):
            try:
                manifest = self.store.manifest(version)
                read_checked(self.store.folder(version) / WEIGHTS, manifest.sha256)
            except WeightError as error:
                log.error("a draft version is damaged", version=version, reason=str(error))
                self._failed(error.reason)
                continue
            return version, manifest
        raise DraftError(f"no draft version in {self.store.root} is whole; delete it to start anew")

    def manifest(self) -> DraftManifest:
        """Of the live version."""
        return self._manifest

    def next_version(self) -> int:
        return max([*self.store.versions(), self.live]) + 1

    async def activate(self, version: int, cause: Cause = "chosen", reason: str = "") -> float:
        """Make a version live; seconds the engine stood still. Raises DraftError.

        ``cause`` and ``reason`` go into the history.
        """
        async with self._lock:
            if self._swapping is not None and not self._swapping.done():
                raise DraftError("the engine has not answered the last swap yet")
            if version == self.live:
                return 0.0
            try:
                manifest = self._check(version)
            except WeightError as error:
                self._failed(error.reason)
                raise DraftError(f"draft version {version} was refused: {error}") from None
            if self._swap is None:
                raise DraftError("the engine is not up yet")
            # Not given up with the wait for it: the engine may swap later, and is believed then.
            self._swapping = asyncio.ensure_future(
                self._swap_by(self._swap, version, manifest, cause, reason)
            )
            try:
                async with asyncio.timeout(SWAP_DEADLINE):
                    return await asyncio.shield(self._swapping)
            except TimeoutError:
                self._failed("deadline")
                raise DraftError(
                    f"the engine did not answer within {SWAP_DEADLINE:.0f} s; if it swaps later, the "
                    "history says so"
                ) from None

    async def _swap_by(
        self, swap: Swap, version: int, manifest: DraftManifest, cause: Cause, reason: str
    ) -> float:
        """Ask the engine, and make live what it has made live; raises DraftError."""
        folder = str(self.store.folder(version))
        try:
            report = await swap(folder, manifest.sha256, version, expected_rates(manifest))
        except Exception as error:  # whatever vLLM raises when its engine is gone
            self._failed("engine")
            raise DraftError(f"the engine could not be asked: {error}") from error
        if report["error"] is not None:
            self._failed(report["reason"])
            raise DraftError(f"draft version {version} was refused: {report['error']}")
        if self._swap is not swap:
            self._failed("engine")
            raise DraftError("the engine died after it swapped; the next one starts as before")
        self.previous, self.live, self._manifest = self.live, version, manifest
        self._write_down()
        self.history.add(version, self.previous, cause, reason)
        self.statistics.count += 1
        self.statistics.last_seconds = report["seconds"]
        self.statistics.seconds_sum += report["seconds"]
        log.info(
            "draft swapped",
            live=version,
            previous=self.previous,
            cause=cause,
            milliseconds=round(report["seconds"] * 1000),
        )
        self._forget_old()
        self._tell()
        return float(report["seconds"])

    async def rollback(self) -> float:
        """Go back to the version that was live before. Raises DraftError."""
        if self.previous is None:
            raise DraftError("there is no previous draft version to go back to")
        return await self.activate(self.previous)

    def _check(self, version: int) -> DraftManifest:
        manifest = self.store.manifest(version)
        if manifest.target_id != self.target_id:
            raise WeightError("target", f"it was trained for {manifest.target_id}")
        if manifest.method != self.method:
            raise WeightError("method", f"it is a {manifest.method} drafter")
        check_signature(self._signature(version), self._signature(self.live))
        return manifest

    def _signature(self, version: int):
        path = self.store.folder(version) / WEIGHTS
        try:
            with open(path, "rb") as file:
                head = file.read(8)
                return signature(head + file.read(int.from_bytes(head, "little") % (1 << 27)))
        except OSError as error:
            raise WeightError("unreadable", f"{path.name}: {error.strerror}") from None

    def _tell(self) -> None:
        for changed in self.on_change:
            changed()

    def _failed(self, reason: str) -> None:
        self.statistics.failed[reason] = self.statistics.failed.get(reason, 0) + 1
        log.warning("draft swap failed; the old drafter serves on", reason=reason, live=self.live)

    def _write_down(self) -> None:
        """A disk that takes nothing costs what a restart would know, not the swap: that has happened."""
        try:
            write_live(self.store.root, LiveDraft(self.live, self.previous))
        except OSError as error:
            log.error(
                "what is live cannot be written down; a restart would serve an earlier version",
                live=self.live, reason=error.strerror,
            )  # fmt: skip

    def _forget_old(self) -> None:
        """Old learned versions go; what an operator gave, and where it began, stays."""
        for version in self.store.versions()[:-KEPT_VERSIONS]:
            if version in (0, self.live, self.previous):
                continue
            try:
                learned = self.store.manifest(version).origin == "learned"
            except WeightError as error:
                # The swap has happened; this is no reason to call it failed.
                log.warning("a damaged version is kept", version=version, reason=str(error))
                continue
            if learned:
                self.store.remove(version)


def write_live(root: Path, state: LiveDraft) -> None:
    partial = root / f".live.json.{os.getpid()}"
    partial.write_bytes(msgspec.json.encode(state))
    partial.rename(root / LIVE_FILE)
