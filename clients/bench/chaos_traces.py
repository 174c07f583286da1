"""Faults of the link to the learner: floods, forgeries, and a learner that takes all and says nothing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import zmq

from clients.bench.chaos_load import Load
from clients.bench.chaos_watch import until
from clients.process import ServerProcess
from rlcore.records.engine_link import CaptureCounts
from rlcore.records.trace import Sampling, VerifyTrace
from rlcore.records.wire import TensorSpec, encode

Figures = dict[str, Any]

NOBODY = 65534
"""A user who owns nothing."""


def garbage_flood(server: ServerProcess, load: Load, seconds: float, rate: float) -> Figures:
    """Random bytes at the learner's trace socket, ``rate`` bytes a second."""
    until(lambda: server.status()["learner"]["alive"], "the learner to report", 240)
    before = _learner(server)
    pid = before["pid"]
    memory = psutil.Process(pid).memory_info().rss
    sent = refused = 0
    chunk = os.urandom(64 * 1024)
    with pushing(server) as socket:
        begun = time.monotonic()
        while (passed := time.monotonic() - begun) < seconds:
            for _ in range(int((passed * rate - sent - refused) // len(chunk))):
                try:
                    socket.send(chunk, zmq.NOBLOCK)
                    sent += len(chunk)
                except zmq.Again:
                    refused += len(chunk)
            time.sleep(0.01)
    until(lambda: _rejected(server) > sum(before["rejected"].values()), "the refusals to count", 60)
    load.wait_for_served(2, 120)
    after = _learner(server)
    gained = {r: n - before["rejected"].get(r, 0) for r, n in after["rejected"].items()}
    return {
        "seconds": seconds,
        "sent_mb": round(sent / 1e6, 1),
        "not_taken_mb": round(refused / 1e6, 1),
        "messages": sent // len(chunk),
        "rejected": {reason: n for reason, n in gained.items() if n},
        "same_learner": after["pid"] == pid,
        "learner_grew_mb": round((psutil.Process(pid).memory_info().rss - memory) / 1e6, 1),
    }


def forged_traces(server: ServerProcess, load: Load, count: int) -> Figures:
    """Traces of the right form that no engine sent: by another user, and by the server's own."""
    until(lambda: server.status()["learner"]["alive"], "the learner to report", 240)
    endpoint = trace_endpoint(server)
    stranger = _sent_by_stranger(endpoint)
    (config,) = (server.home / "drafts").glob("*/000000/config.json")
    hidden = json.loads(config.read_text())["hidden_size"]
    before, traces = _learner(server), server.status()["traces"]["sent"]
    with pushing(server) as socket:
        for number in range(count):
            socket.send_multipart(_forged(number, hidden))
    until(lambda: _rejected(server) >= sum(before["rejected"].values()) + count, "all to count", 60)
    load.wait_for_served(2, 120)
    time.sleep(2)
    after, sent = _learner(server), server.status()["traces"]["sent"]
    gained = {r: n - before["rejected"].get(r, 0) for r, n in after["rejected"].items()}
    return {
        "other_user_connected": stranger,
        "forged": count,
        "rejected": {reason: n for reason, n in gained.items() if n},
        "taken_beyond_the_engine's": max(
            0, after["received"] - before["received"] - (sent - traces) - _UNDER_WAY
        ),
        "same_learner": after["pid"] == before["pid"],
    }


_UNDER_WAY = 16
"""Spans that may lie between the two ends when they are counted."""


def silent_learner(server: ServerProcess, load: Load, seconds: float) -> Figures:
    """Its learner takes the connection and then reads, says and publishes nothing (``mute``)."""
    before = server.status()["traces"]
    memory = _tree_bytes(server)
    load.wait_for_served(4, 240)
    time.sleep(seconds)
    after = server.status()
    counts = CaptureCounts(**after["traces"])
    return {
        "seconds": seconds,
        "captured": counts.captured - before["captured"],
        "sent": counts.sent - before["sent"],
        "dropped": counts.dropped,
        "learner_alive": after["learner"]["alive"],
        "grew_mb": round((_tree_bytes(server) - memory) / 1e6, 1),
    }


@contextmanager
def mute(folder: Path) -> Iterator[str]:
    """The address of a learner that is there, and nothing else."""
    base = f"ipc://{folder}/mute"
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    traces, control = context.socket(zmq.PULL), context.socket(zmq.ROUTER)
    try:
        for socket, name in ((traces, "traces"), (control, "control")):
            socket.setsockopt(zmq.RCVHWM, 4)
            socket.bind(f"{base}.{name}")
        yield base
    finally:
        context.destroy(linger=0)


@contextmanager
def pushing(server: ServerProcess) -> Iterator[zmq.Socket[bytes]]:
    """Another sender at the learner's trace socket."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    socket = context.socket(zmq.PUSH)
    socket.setsockopt(zmq.SNDHWM, 32)
    socket.setsockopt(zmq.SNDTIMEO, 10_000)
    try:
        socket.connect(trace_endpoint(server))
        yield socket
    finally:
        socket.close(linger=5000)
        context.term()


def trace_endpoint(server: ServerProcess) -> str:
    """Of the learner that the server started."""
    return f"ipc://{server.home}/run/learner.traces"


STRANGER = """
import os, sys, zmq
os.setgroups([]); os.setgid({user}); os.setuid({user})
socket = zmq.Context().socket(zmq.PUSH)
socket.setsockopt(zmq.IMMEDIATE, 1); socket.setsockopt(zmq.SNDTIMEO, 3000); socket.setsockopt(zmq.LINGER, 0)
socket.connect(sys.argv[1])
try:
    socket.send(b"x"); print("connected")
except zmq.Again:
    print("refused")
"""


def _sent_by_stranger(endpoint: str) -> bool | None:
    """Whether a user who owns nothing can send there; None where this user cannot become one."""
    if os.geteuid() != 0:
        return None
    words = [sys.executable, "-c", STRANGER.format(user=NOBODY), endpoint]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60, check=True)
    return done.stdout.strip() == "connected"


def _forged(number: int, hidden: int) -> list[bytes]:
    """A trace of the right form, with states that no model has computed.

    The learner can tell because they do not give the normaliser that the trace names. Whoever has the model's
    head can forge that too: who may send at all is what protects.
    """
    rows = 12
    widths = {"aux": 3 * hidden, "last": hidden}
    tensors = [TensorSpec(name, "bfloat16", (rows, width)) for name, width in widths.items()]
    tensors.append(TensorSpec("logsumexp", "float32", (rows,)))
    trace = VerifyTrace(
        request_id=f"forged-{number}", tenant="default", target_version=0, span_index=0, final=True,
        first_position=0, prompt_length=4, prompt_hash="f" * 32, token_ids=[5] * 13,
        sampling=Sampling(), grammar=False, steps=[], tensors=tensors,
    )  # fmt: skip
    return [encode(trace), *(bytes(spec.nbytes) for spec in tensors)]


def _learner(server: ServerProcess) -> Figures:
    found: Figures = server.status()["learner"]
    return found


def _rejected(server: ServerProcess) -> int:
    return sum(_learner(server)["rejected"].values())


def _tree_bytes(server: ServerProcess) -> int:
    total = 0
    for process in (psutil.Process(server.pid), *server.children()):
        with suppress(psutil.NoSuchProcess):
            total += process.memory_info().rss
    return total
