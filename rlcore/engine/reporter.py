"""The scheduler's background thread: its figures to the server, once a second, also between steps."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable

import zmq

from rlcore.engine.courier import REPORT_INTERVAL
from rlcore.records.engine_link import SpeculationReport
from rlcore.records.wire import encode
from rlcore.transport import check_endpoint, open_socket, send


class Reporter(threading.Thread):
    """Connects to the server's engine link; sends without waiting, so a lost server costs nothing."""

    def __init__(self, endpoint: str, report: Callable[[], SpeculationReport]) -> None:
        super().__init__(name="paceline-reporter", daemon=True)
        self._endpoint = check_endpoint(endpoint)
        self._report = report
        self._stopping = threading.Event()

    def stop(self) -> None:
        self._stopping.set()
        self.join(timeout=2.0)

    def run(self) -> None:
        # As the courier's: sending belongs on the cores that do not compute.
        with contextlib.suppress(OSError):
            os.sched_setaffinity(0, range(os.cpu_count() or 1))
        context = zmq.Context()
        link = open_socket(context, zmq.DEALER, self._endpoint, bind=False)
        try:
            while not self._stopping.wait(REPORT_INTERVAL):
                send(link, [encode(self._report())])
        finally:
            context.destroy(linger=0)
