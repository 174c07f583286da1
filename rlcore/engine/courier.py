"""The engine's background thread: spans out to the learner, counters and ends to and from the server.

A step only appends to a bounded queue; everything that could wait happens here. A request's spans
are held until the server says how many tokens its response really returned and whether it may be
learned from; nothing leaves this process before that.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import zmq

from rlcore.curve import curve_client
from rlcore.engine.options import EngineOptions
from rlcore.engine.shares import Shares
from rlcore.engine.spans import Span, trim
from rlcore.records.engine_link import (
    CaptureCounts,
    CoresSpared,
    EngineReport,
    ForgetTenant,
    RequestEnd,
    decode_engine_message,
)
from rlcore.records.wire import RecordError, encode
from rlcore.transport import check_endpoint, open_socket, receive, send

REPORT_INTERVAL = 1.0
"""Seconds between two reports to the server."""

END_DEADLINE = 10.0
"""Seconds that a finished request waits for the server's word; after it, its spans are dropped."""

REMEMBERED_ENDS = 4096


@dataclass
class _Held:
    """What waits for the server's word on one request."""

    spans: list[Span] = field(default_factory=list)
    deadline: float | None = None
    """Set when the engine is done with the request."""


class Courier(threading.Thread):
    """Owns both sockets. ``offer`` and ``drop`` are the only methods the step calls."""

    def __init__(
        self,
        options: EngineOptions,
        report: Callable[[CaptureCounts], EngineReport],
        drafted: Callable[[str], tuple[int, int]],
    ):
        """``drafted``: a request's steps with drafts verified, and the tokens they emitted."""
        super().__init__(name="paceline-courier", daemon=True)
        self._options = options
        self._report = report
        self._drafted = drafted
        self.tenants = Shares()
        """This thread's only; ``report`` runs in it."""
        self._lock = threading.Lock()
        self._queue: deque[tuple[str, Span | None, bool]] = deque()
        self._counts = CaptureCounts()
        self._held: OrderedDict[str, _Held] = OrderedDict()
        self._held_spans = 0
        self._ends: OrderedDict[str, RequestEnd] = OrderedDict()
        self._stopping = threading.Event()
        self.cores_spared = 0
        """The server's last word on it."""
        self._link: zmq.Socket[bytes]
        self._traces: zmq.Socket[bytes] | None = None
        secret, server_key = options.trace_secret_file, options.trace_server_key_file
        self._curve = curve_client(
            None if secret is None else Path(secret),
            None if server_key is None else Path(server_key),
        )
        for endpoint in (options.link_endpoint, options.trace_endpoint):
            if endpoint is not None:
                check_endpoint(endpoint, encrypted=self._curve is not None)

    def offer(self, request_id: str, span: Span | None, final: bool) -> None:
        """Take a span, or the news that a request has no more; when full, the oldest span goes."""
        with self._lock:
            self._counts.captured += span is not None
            if len(self._queue) >= self._options.capture_queue:
                oldest_id, oldest, was_final = self._queue.popleft()
                if oldest is not None:
                    self._count_drop("queue_full")
                if was_final:  # without this the request's other spans would wait for ever
                    self._queue.append((oldest_id, None, True))
            self._queue.append((request_id, span, final))

    def drop(self, reason: str) -> None:
        """Count a span that will not be sent."""
        with self._lock:
            self._count_drop(reason)

    def stop(self) -> None:
        self._stopping.set()
        self.join(timeout=2.0)

    def run(self) -> None:
        # vLLM has bound this process to the cores that compute; sending belongs on the others. The
        # sockets are opened here, so that ZeroMQ's own thread inherits that.
        with contextlib.suppress(OSError):
            os.sched_setaffinity(0, range(os.cpu_count() or 1))
        context = zmq.Context()
        self._link = open_socket(context, zmq.DEALER, self._options.link_endpoint, bind=False)
        if self._options.trace_endpoint is not None:
            self._traces = open_socket(
                context, zmq.PUSH, self._options.trace_endpoint, bind=False, curve=self._curve
            )
        try:
            self._serve()
        finally:
            context.destroy(linger=0)

    def _serve(self) -> None:
        next_report = 0.0
        while not self._stopping.is_set():
            self._link.poll(20)
            self._take_messages()
            self._take_spans()
            self._expire()
            now = time.monotonic()
            if now >= next_report:
                next_report = now + REPORT_INTERVAL
                send(self._link, [encode(self._report(self._snapshot()))])

    def _count_drop(self, reason: str) -> None:
        self._counts.dropped[reason] = self._counts.dropped.get(reason, 0) + 1

    def _snapshot(self) -> CaptureCounts:
        with self._lock:
            return CaptureCounts(
                self._counts.captured, self._counts.sent, dict(self._counts.dropped)
            )

    def _take_messages(self) -> None:
        while (frames := receive(self._link)) is not None:
            try:
                message = decode_engine_message(frames[-1])
            except RecordError as error:
                self.drop(f"link_{error.reason}")
                continue
            if isinstance(message, CoresSpared):
                self.cores_spared = message.cores
            elif isinstance(message, ForgetTenant):
                self._forget(message.tenant)
            elif isinstance(message, RequestEnd):
                steps, emitted = self._drafted(message.request_id)
                share = self.tenants.of(message.tenant)
                share.steps += steps
                share.emitted += emitted
                self._ends[message.request_id] = message
                while len(self._ends) > REMEMBERED_ENDS:
                    self._ends.popitem(last=False)
                self._settle(message.request_id)

    def _take_spans(self) -> None:
        while True:
            with self._lock:
                if not self._queue:
                    return
                request_id, span, final = self._queue.popleft()
            held = self._held.setdefault(request_id, _Held())
            if span is not None:
                held.spans.append(span)
                self._held_spans += 1
            if final:
                held.deadline = time.monotonic() + END_DEADLINE
                self._settle(request_id)
            while self._held_spans > self._options.capture_queue:
                self._abandon(next(iter(self._held)), "queue_full")

    def _settle(self, request_id: str) -> None:
        """Send a request's spans once both the engine and the server are done with it."""
        held, end = self._held.get(request_id), self._ends.get(request_id)
        if held is None or held.deadline is None or end is None:
            return
        del self._ends[request_id]
        if not end.learn:
            self._abandon(request_id, "opted_out")
            return
        self._held_spans -= len(self._held.pop(request_id).spans)
        trimmed = [trim(span, span.trace.prompt_length + end.output_tokens) for span in held.spans]
        spans = [span for span in trimmed if span is not None]
        for index, span in enumerate(spans):
            span.trace.tenant, span.trace.ended = end.tenant, end.ended
            # Known only now: the engine's last span may be empty, or be cut away.
            span.trace.final = index == len(spans) - 1
            self._push(span)

    def _forget(self, tenant: str) -> None:
        """Drop what is held of a tenant's ended requests; those under way end without learning."""
        self._take_spans()
        for request_id, end in list(self._ends.items()):
            if end.tenant != tenant:
                continue
            held = self._held.get(request_id)
            if held is not None:
                self._held_spans -= len(held.spans)
                for _ in held.spans:
                    self.drop("purged")
                held.spans.clear()
            self._ends[request_id] = msgspec.structs.replace(end, learn=False)

    def _expire(self) -> None:
        now = time.monotonic()
        late = [r for r, h in self._held.items() if h.deadline is not None and h.deadline < now]
        for request_id in late:
            self._abandon(request_id, "no_end")

    def _abandon(self, request_id: str, reason: str) -> None:
        spans = self._held.pop(request_id).spans
        self._held_spans -= len(spans)
        for _ in spans:
            self.drop(reason)

    def _push(self, span: Span) -> None:
        if self._traces is None:
            self.drop("no_learner")
        elif send(self._traces, [encode(span.trace), *span.frames()]):
            self.tenants.of(span.trace.tenant).traces += 1
            with self._lock:
                self._counts.sent += 1
        else:
            self.drop("learner_away")
