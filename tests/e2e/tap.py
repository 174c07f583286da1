"""The test's own end of the learner's link: takes a server's traces and promotes what a test makes."""

from __future__ import annotations

import socket
import threading
import time
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import msgspec
import torch
import zmq

from learner.batch import Span
from rlcore.records.learner_link import (
    Announce,
    DraftFiles,
    FetchDraft,
    FetchTarget,
    Hello,
    LearnerMessage,
    TargetTensors,
    Verdict,
    decode_learner_message,
)
from rlcore.records.trace import VerifyTrace, decode_trace
from rlcore.records.versions import DraftManifest
from rlcore.records.wire import encode
from rlcore.transport import learner_endpoints, open_socket, receive, send
from rlcore.weights import FILES, MANIFEST

SETTLED = 0.3
"""Seconds of silence after which no further span of a request is expected: the engine sends all
spans of a request in one go."""


@dataclass(frozen=True)
class Captured:
    """One trace message, checked, with its tensor frames."""

    trace: VerifyTrace
    frames: list[bytes]

    @property
    def span(self) -> Span:
        return Span.from_trace(self.trace, self.frames)

    def tensor(self, name: str) -> torch.Tensor:
        """[n, ...] as captured, in the serving dtype."""
        for spec, frame in zip(self.trace.tensors, self.frames, strict=True):
            if spec.name == name:
                dtype = getattr(torch, spec.dtype)
                return torch.frombuffer(bytearray(frame), dtype=dtype).view(spec.shape)
        raise KeyError(name)


class LearnerTap:
    """``with LearnerTap() as tap: ... --learner tap.base ...``; a thread of its own pumps the sockets.

    ``problems`` holds what the server sent that is no valid message; a test asserts it is empty.
    """

    def __init__(self) -> None:
        self.base = f"tcp://127.0.0.1:{two_free_ports()}"
        self.problems: list[str] = []
        self.hellos: list[Hello] = []
        self.verdicts: dict[int, Verdict] = {}
        self.targets: dict[int, tuple[TargetTensors, list[bytes]]] = {}
        self._files: dict[int, dict[str, bytes]] = {}
        self._captured: list[Captured] = []
        self._outgoing: deque[LearnerMessage] = deque()
        self._changed = threading.Condition()
        self._stopping = threading.Event()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        traces, control = learner_endpoints(self.base)
        self._traces = open_socket(self._context, zmq.PULL, traces, bind=True, high_water=4096)
        self._control = open_socket(self._context, zmq.ROUTER, control, bind=True)
        self._servers: set[bytes] = set()
        self._thread = threading.Thread(target=self._pump, name="learner-tap", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stopping.set()
        self._thread.join(10)
        self._traces.close()
        self._control.close()
        self._context.term()

    def of_response(
        self, response_id: str, tokens: int, deadline_s: float = 20.0
    ) -> list[Captured]:
        """All spans of one API response, once they hold ``tokens`` emitted tokens, in order.

        What is there at the deadline is returned as it is: the test compares.
        """
        end = time.monotonic() + deadline_s
        while True:
            found = self._of(response_id)
            if sum(len(c.trace.emitted_ids()) for c in found) >= tokens:
                time.sleep(SETTLED)
                found = self._of(response_id)
                return sorted(found, key=lambda c: (c.trace.request_id, c.trace.span_index))
            if not self._wait(end):
                return found

    def by_request(self, response_id: str, tokens: int) -> dict[str, list[Captured]]:
        """The same by engine request: one for each choice of the response."""
        requests: dict[str, list[Captured]] = {}
        for captured in self.of_response(response_id, tokens):
            requests.setdefault(captured.trace.request_id, []).append(captured)
        return requests

    def announce(
        self, manifest: DraftManifest, files: Mapping[str, bytes], deadline_s: float = 30.0
    ) -> Verdict:
        """Offer a version as a learner does, serve its files, and give back the server's word."""
        version = manifest.version
        self._files[version] = {name: bytes(files[name]) for name in FILES}
        self.verdicts.pop(version, None)
        self._outgoing.append(Announce(manifest))
        end = time.monotonic() + deadline_s
        while version not in self.verdicts:
            if not self._wait(end):
                raise TimeoutError(f"no verdict on version {version}")
        return self.verdicts[version]

    def target(self, version: int, deadline_s: float = 30.0) -> tuple[TargetTensors, list[bytes]]:
        """Ask for what a learner needs of a target version, and give back the server's answer."""
        self._outgoing.append(FetchTarget(version))
        end = time.monotonic() + deadline_s
        while version not in self.targets:
            if not self._wait(end):
                raise TimeoutError(f"no tensors of target version {version}")
        return self.targets.pop(version)

    def hello(self, deadline_s: float = 30.0) -> Hello:
        """The server's newest introduction."""
        end = time.monotonic() + deadline_s
        while not self.hellos:
            if not self._wait(end):
                raise TimeoutError("no server has said hello")
        return self.hellos[-1]

    def _of(self, response_id: str) -> list[Captured]:
        with self._changed:
            return [c for c in self._captured if response_id in c.trace.request_id]

    def _wait(self, end: float) -> bool:
        with self._changed:
            self._changed.wait(0.1)
        return time.monotonic() < end

    def _pump(self) -> None:
        poller = zmq.Poller()
        poller.register(self._traces, zmq.POLLIN)
        poller.register(self._control, zmq.POLLIN)
        while not self._stopping.is_set():
            poller.poll(20)
            with self._changed:
                try:
                    self._take_traces()
                    self._take_messages()
                except ValueError as error:
                    self.problems.append(str(error))
                self._changed.notify_all()
            with suppress(IndexError):
                message = self._outgoing.popleft()
                for server in self._servers:
                    send(self._control, [server, encode(message)])

    def _take_traces(self) -> None:
        while (frames := receive(self._traces)) is not None:
            copied = [bytes(frame) for frame in frames]
            self._captured.append(Captured(decode_trace(copied), copied[1:]))

    def _take_messages(self) -> None:
        while (frames := receive(self._control)) is not None:
            server = bytes(frames[0])
            message = decode_learner_message(frames[1])
            self._servers.add(server)
            if isinstance(message, Hello):
                self.hellos.append(message)
            elif isinstance(message, Verdict):
                self.verdicts[message.version] = message
            elif isinstance(message, TargetTensors):
                self.targets[message.version] = message, [bytes(f) for f in frames[2:]]
            elif isinstance(message, FetchDraft):
                files = self._files.get(message.version)
                if files is None:
                    answer = DraftFiles(message.version, error="never announced")
                else:
                    sizes = [len(content) for content in files.values()]
                    answer = DraftFiles(message.version, list(files), sizes)
                send(self._control, [server, encode(answer), *(files or {}).values()])


def version_files(folder: Path, **changes: Any) -> tuple[DraftManifest, dict[str, bytes]]:
    """A stored version's files, its manifest with the given fields changed."""
    files = {name: (folder / name).read_bytes() for name in FILES}
    manifest = msgspec.json.decode(files[MANIFEST], type=DraftManifest)
    manifest = msgspec.structs.replace(manifest, **changes)
    return manifest, {**files, MANIFEST: msgspec.json.encode(manifest)}


def two_free_ports() -> int:
    """A loopback port that was free a moment ago, and the one after it too."""
    for _ in range(100):
        with socket.socket() as first, socket.socket() as second:
            first.bind(("127.0.0.1", 0))
            port: int = first.getsockname()[1]
            try:
                second.bind(("127.0.0.1", port + 1))
            except (OSError, OverflowError):
                continue
            return port
    raise RuntimeError("no two neighbouring ports are free")
