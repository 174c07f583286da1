"""The server's side of the link to its engine workers: counters in, request ends out."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

import msgspec
import zmq
import zmq.asyncio

from rlcore.log import get_logger
from rlcore.records.engine_link import (
    CoresSpared,
    EngineReport,
    ForgetTenant,
    RequestEnd,
    SpeculationReport,
    decode_engine_message,
)
from rlcore.records.wire import RecordError, encode
from rlcore.transport import open_socket
from server.totals import added, added_speculation

log = get_logger("server")


class EngineLink:
    """Bound before the engine starts; its workers and its scheduler connect to it.

    ``report`` is a worker's newest report, ``speculation`` the scheduler's; their totals are those since the
    server started, whichever engine counted them.
    """

    def __init__(self, endpoint: str) -> None:
        self._socket = open_socket(zmq.asyncio.Context.instance(), zmq.ROUTER, endpoint, bind=True)
        self._workers: set[bytes] = set()
        self._peers: set[bytes] = set()
        """All that the present engine speaks with."""
        self._gone: set[bytes] = set()
        """Those of engines that died."""
        self._before: EngineReport | None = None
        self._speculation_before: SpeculationReport | None = None
        """The last ones of an engine that died, with the totals of all before it."""
        self.report: EngineReport | None = None
        self.reported_at = 0.0
        self.speculation: SpeculationReport | None = None
        self.speculation_at = 0.0
        self.on_report: list[Callable[[EngineReport], None]] = []
        self.rejected = 0

    async def run(self) -> None:
        """Receive for ever; cancel to stop."""
        while True:
            frames = await self._socket.recv_multipart()
            if frames[0] in self._gone:
                continue  # sent before it died
            try:
                message = decode_engine_message(frames[-1])
            except RecordError as error:
                self.rejected += 1
                log.warning("an engine message was dropped", reason=str(error))
                continue
            self._peers.add(frames[0])
            if isinstance(message, SpeculationReport):
                earlier = self._speculation_before
                self.speculation = added_speculation(earlier, message) if earlier else message
                self.speculation_at = time.monotonic()
            elif isinstance(message, EngineReport):
                self._workers.add(frames[0])
                self.report = added(self._before, message) if self._before else message
                self.reported_at = time.monotonic()
                for heard in self.on_report:
                    heard(self.report)

    def send_end(self, end: RequestEnd) -> None:
        """Tell every worker how a request ended. Never waits; a full queue costs that one trace."""
        self._tell(encode(end))

    def forget(self, tenant: str) -> None:
        """Tell every worker to send nothing more of what it holds of a tenant."""
        self._tell(encode(ForgetTenant(tenant)))

    def spare_cores(self, cores: int) -> None:
        """Tell every worker how many cores to leave to others."""
        self._tell(encode(CoresSpared(cores)))

    def _tell(self, payload: bytes) -> None:
        for worker in self._workers:
            # Sent at once or queued; a ROUTER drops what a gone worker cannot take.
            self._socket.send_multipart([worker, payload])

    async def wait_for_worker(self, deadline: float) -> None:
        """Until the engine's first report is here; raises TimeoutError after ``deadline`` seconds."""
        async with asyncio.timeout(deadline):
            while not self._workers:
                await asyncio.sleep(0.05)

    def forget_workers(self) -> None:
        """The engine has died: its workers are gone, its totals stay."""
        self._gone |= self._peers
        self._workers, self._peers = set(), set()
        if self.report is not None:
            self.report = msgspec.structs.replace(self.report, running=0)
        if self.speculation is not None:
            self.speculation = msgspec.structs.replace(self.speculation, running=0, waiting=0)
        self._before, self._speculation_before = self.report, self.speculation

    def close(self) -> None:
        self._socket.close()
