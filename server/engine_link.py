"""The server's side of the link to its engine workers: counters in, request ends out."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

import zmq
import zmq.asyncio

from rlcore.log import get_logger
from rlcore.records import (
    CoresSpared,
    EngineReport,
    RecordError,
    RequestEnd,
    decode_engine_message,
    encode,
)
from rlcore.transport import open_socket

log = get_logger("server")


class EngineLink:
    """Bound before the engine starts; workers connect to it. ``report`` is the newest report."""

    def __init__(self, endpoint: str) -> None:
        self._socket = open_socket(zmq.asyncio.Context.instance(), zmq.ROUTER, endpoint, bind=True)
        self._workers: set[bytes] = set()
        self.report: EngineReport | None = None
        self.reported_at = 0.0
        self.on_report: list[Callable[[EngineReport], None]] = []
        self.rejected = 0

    async def run(self) -> None:
        """Receive for ever; cancel to stop."""
        while True:
            frames = await self._socket.recv_multipart()
            try:
                message = decode_engine_message(frames[-1])
            except RecordError as error:
                self.rejected += 1
                log.warning("an engine message was dropped", reason=str(error))
                continue
            self._workers.add(frames[0])
            if isinstance(message, EngineReport):
                self.report = message
                self.reported_at = time.monotonic()
                for heard in self.on_report:
                    heard(message)

    def send_end(self, end: RequestEnd) -> None:
        """Tell every worker how a request ended. Never waits; a full queue costs that one trace."""
        payload = encode(end)
        for worker in self._workers:
            # Sent at once or queued; a ROUTER drops what a gone worker cannot take.
            self._socket.send_multipart([worker, payload])

    def spare_cores(self, cores: int) -> None:
        """Tell every worker how many cores to leave to others."""
        payload = encode(CoresSpared(cores))
        for worker in self._workers:
            self._socket.send_multipart([worker, payload])

    async def wait_for_worker(self, deadline: float) -> None:
        """Until the first report is here; raises TimeoutError after ``deadline`` seconds."""
        async with asyncio.timeout(deadline):
            while self.report is None:
                await asyncio.sleep(0.05)

    def close(self) -> None:
        self._socket.close()
