"""Orders to delete a tenant's traces: given to the learner, waited for, remembered until they are done."""

from __future__ import annotations

import asyncio
import math
import os
import secrets
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import msgspec

from rlcore.errors import PacelineError
from rlcore.home import Home
from rlcore.log import get_logger
from rlcore.records.learner_link import Purge, PurgeCounts, Purged

log = get_logger("server")

PURGE_DEADLINE = 60.0
"""Seconds a learner is waited for: it may be in the middle of a judgement, and then reads its journal."""

RETRY_INTERVAL = 5.0
"""Seconds between two orders, until the learner has answered."""

OPEN_PURGES = "open-purges.json"
"""In the home's learner folder."""


class PurgeDelayed(PacelineError):
    """The traces are not gone yet; the order stands, and is carried out when it can be."""


class EndClock:
    """Seconds since the epoch that never stand still or go back, whatever is done to the system's clock."""

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._last = 0.0

    def now(self) -> float:
        self._last = max(self._clock(), math.nextafter(self._last, math.inf))
        return self._last


class ToLearner(Protocol):
    """What is needed of the link."""

    on_purged: list[Callable[[Purged], None]]

    @property
    def alive(self) -> bool: ...

    def order(self, purge: Purge) -> None: ...


@dataclass
class _Open:
    """A tenant's order that is not done."""

    purge: Purge
    waiting: list[asyncio.Future[PurgeCounts]] = field(default_factory=list)


class Purges:
    """``link`` is None where there is no learner; ``kept`` then says whether an earlier one left traces.

    ``forget`` has the engine drop what it holds of a tenant's ended requests; ``clock`` says when one ended.
    """

    def __init__(
        self,
        path: Path,
        link: ToLearner | None,
        kept: Callable[[], bool],
        forget: Callable[[str], None],
        clock: EndClock,
    ) -> None:
        self._path = path
        self._link = link
        self._kept = kept
        self._forget = forget
        self.clock = clock
        self._ordered: dict[str, float] = {}
        """When each tenant was last purged, monotonic seconds."""
        self._open = {purge.tenant: _Open(purge) for purge in _load(path)}
        self._writing = threading.Lock()
        self._closing: set[asyncio.Task[None]] = set()
        if link is not None:
            link.on_purged.append(self._hear)

    @property
    def pending(self) -> list[Purge]:
        """Orders that are not done."""
        return [one.purge for one in list(self._open.values())]

    async def purge(self, tenant: str, deadline_s: float = PURGE_DEADLINE) -> PurgeCounts:
        """Delete everything of a tenant's requests so far; what was deleted, once it is gone.

        Raises PurgeDelayed when the learner does not say so in time.
        """
        self._ordered[tenant] = time.monotonic()
        self._forget(tenant)
        order = Purge(secrets.token_hex(8), tenant, self.clock.now())
        if self._link is None and not self._kept():
            return PurgeCounts()
        one = self._open.setdefault(tenant, _Open(order))
        one.purge = order
        done: asyncio.Future[PurgeCounts] = asyncio.get_running_loop().create_future()
        one.waiting.append(done)
        try:
            await asyncio.to_thread(self._remember)
            if self._link is None:
                raise PurgeDelayed(
                    "this server runs without a learner, and an earlier one has left traces on the disk; "
                    "they are purged as soon as a learner runs"
                )
            self._link.order(order)
            async with asyncio.timeout(deadline_s):
                return await done
        except TimeoutError:
            raise PurgeDelayed(
                f"the learner has not answered within {deadline_s:.0f} s; the traces are purged when it does"
            ) from None
        finally:
            if done in one.waiting:
                one.waiting.remove(done)

    def covers(self, tenant: str, came: float) -> bool:
        """Whether a request was under way, if only its body, when its tenant's traces were purged.

        Nothing of it is kept, however late it ends. ``came``: monotonic seconds.
        """
        return came <= self._ordered.get(tenant, -math.inf)

    async def run(self) -> None:
        """Give the open orders again and again; cancel to stop."""
        while True:
            if self._link is not None and self._link.alive:
                for purge in self.pending:
                    self._link.order(purge)
            await asyncio.sleep(RETRY_INTERVAL)

    def _remember(self) -> None:
        """Over a restart. A disk that is full is no reason not to delete.

        One at a time, and each as of when its turn comes: orders of several tenants at once share the file.
        """
        try:
            with self._writing:
                _save(self._path, self.pending)
        except OSError as error:
            log.error("the open purges cannot be written to disk", reason=error.strerror)

    def _hear(self, answer: Purged) -> None:
        for tenant, one in list(self._open.items()):
            if one.purge.purge_id != answer.purge_id:
                continue
            waiting, one.waiting = one.waiting, []
            if answer.error is not None:
                log.error("a purge has failed and is tried again", reason=answer.error)
                for future in waiting:
                    if not future.done():
                        future.set_exception(PurgeDelayed(f"{answer.error}; it is tried again"))
                continue
            del self._open[tenant]
            closing = asyncio.ensure_future(self._close(answer.deleted, waiting))
            self._closing.add(closing)
            closing.add_done_callback(self._closing.discard)

    async def _close(
        self, deleted: PurgeCounts, waiting: list[asyncio.Future[PurgeCounts]]
    ) -> None:
        # The disk has to confirm it, and the loop streams tokens meanwhile.
        await asyncio.to_thread(self._remember)
        log.info("a tenant's traces are purged", **msgspec.structs.asdict(deleted))
        for future in waiting:
            if not future.done():
                future.set_result(deleted)


def has_traces(home: Home) -> bool:
    """Whether a learner of this home folder has left traces in it, or knows of recordings."""
    found = [*home.learner.glob("*/replay/*.traces"), *home.learner.glob("recordings/*.json")]
    return bool(found)


def _load(path: Path) -> list[Purge]:
    try:
        return msgspec.json.decode(path.read_bytes(), type=list[Purge])
    except FileNotFoundError:
        return []
    except (OSError, msgspec.DecodeError, UnicodeDecodeError) as error:
        raise PacelineError(
            f"the open purges in {path} cannot be read ({error}); purge the tenants again and delete it"
        ) from None


def _save(path: Path, purges: list[Purge]) -> None:
    """Raises OSError."""
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    if not purges:
        path.unlink(missing_ok=True)
        return
    try:
        with open(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
            file.write(msgspec.json.encode(purges))
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)
