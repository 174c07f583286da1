"""The learner's two sockets: traces in, and the control link to the servers."""

from __future__ import annotations

import time
from collections.abc import Callable

import zmq

from rlcore.curve import CurveServer
from rlcore.records.learner_link import (
    DraftFiles,
    FetchDraft,
    LearnerMessage,
    decode_learner_message,
)
from rlcore.records.trace import VerifyTrace, decode_trace
from rlcore.records.wire import RecordError, encode
from rlcore.transport import (
    MAX_WEIGHT_FRAME_BYTES,
    Frame,
    learner_endpoints,
    open_socket,
    receive,
    send,
)
from rlcore.weights import WeightError, WeightStore

REMEMBERED_FOR = 60.0
"""Seconds without a hello after which a server is not told anything any more; it says one every two."""

TraceCheck = Callable[[VerifyTrace], None]
"""Raises RecordError for a trace that does not belong to this learner."""


class Inbox:
    """Non-blocking. ``rejected`` counts refused messages by reason; none of them is fatal."""

    def __init__(self, base: str, curve: CurveServer | None = None) -> None:
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context.instance()
        traces, control = learner_endpoints(base, encrypted=curve is not None)
        self._curve = curve
        self._traces = open_socket(
            context, zmq.PULL, traces, bind=True, high_water=128, curve=curve
        )
        self._control = open_socket(
            context,
            zmq.ROUTER,
            control,
            bind=True,
            max_frame_bytes=MAX_WEIGHT_FRAME_BYTES,
            curve=curve,
        )
        self._servers: dict[bytes, float] = {}
        """When each last said hello; one that connects again is another one."""
        self.rejected: dict[str, int] = {}

    def wait(self, milliseconds: int) -> None:
        """Until something arrives, at most so long."""
        poller = zmq.Poller()
        poller.register(self._traces, zmq.POLLIN)
        poller.register(self._control, zmq.POLLIN)
        poller.poll(milliseconds)

    def traces(self, check: TraceCheck, limit: int = 64) -> list[tuple[VerifyTrace, list[Frame]]]:
        """At most ``limit`` waiting traces, each with all its frames (the header among them)."""
        taken: list[tuple[VerifyTrace, list[Frame]]] = []
        for _ in range(limit):
            frames = receive(self._traces)
            if frames is None:
                break
            try:
                trace = decode_trace(frames)
                check(trace)
            except RecordError as error:
                self.reject(error.reason)
                continue
            taken.append((trace, list(frames)))
        return taken

    def messages(self) -> list[tuple[bytes, LearnerMessage, list[Frame]]]:
        """Every waiting control message: (server, message, further frames)."""
        taken: list[tuple[bytes, LearnerMessage, list[Frame]]] = []
        while (frames := receive(self._control)) is not None:
            if len(frames) < 2:
                self.reject("malformed")
                continue
            server = bytes(frames[0])
            try:
                message = decode_learner_message(frames[1])
            except RecordError as error:
                self.reject(error.reason)
                continue
            taken.append((server, message, list(frames[2:])))
        return taken

    def accept(self, server: bytes) -> None:
        """From now on ``tell_all`` reaches this server too, as long as it says hello."""
        now = time.monotonic()
        self._servers[server] = now
        gone = [s for s, heard in self._servers.items() if now - heard > REMEMBERED_FOR]
        for one in gone:
            del self._servers[one]

    def reject(self, reason: str) -> None:
        self.rejected[reason] = self.rejected.get(reason, 0) + 1

    def tell(
        self, server: bytes, message: LearnerMessage, files: list[bytes] | None = None
    ) -> None:
        send(self._control, [server, encode(message), *(files or [])])

    def tell_all(self, message: LearnerMessage) -> None:
        for server in self._servers:
            self.tell(server, message)

    def give(self, server: bytes, request: FetchDraft, store: WeightStore) -> None:
        """Answer a request for a version's files."""
        try:
            files = store.files(request.version)
        except WeightError as error:
            self.tell(server, DraftFiles(request.version, error=str(error)))
            return
        sizes = [len(content) for content in files.values()]
        self.tell(server, DraftFiles(request.version, list(files), sizes), list(files.values()))

    def close(self) -> None:
        self._traces.close()
        self._control.close()
        if self._curve is not None:
            self._curve.stop()
