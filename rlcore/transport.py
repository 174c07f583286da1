"""ZeroMQ sockets as every part of Paceline opens them, and non-blocking multipart send and receive.

Ends are ipc or loopback TCP, because traces are text; with CURVE keys (``rlcore.curve``) the link is
encrypted, both ends know each other, and it may leave the machine. Frames travel without a copy and
without pickle. A message larger than a receiver's limit is dropped by ZeroMQ itself, before it is
allocated.
"""

from __future__ import annotations

import ipaddress
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

import zmq

from rlcore.curve import Curve

MAX_FRAME_BYTES = 512 * 1024 * 1024
"""The largest frame a trace socket takes: the states of a very long span."""

MAX_WEIGHT_FRAME_BYTES = 8 * 1024**3
"""The largest frame a control socket takes: the weights of a drafter."""

Frame = bytes | memoryview

Socket = TypeVar("Socket", bound="zmq.Socket[Any]")


class EndpointError(ValueError):
    """An address that must not or cannot be used."""


def check_endpoint(endpoint: str, *, encrypted: bool = False) -> str:
    """The endpoint itself, if it stays on this machine or is encrypted; raises EndpointError."""
    parts = urlsplit(endpoint)
    if parts.scheme == "ipc" and endpoint != "ipc://":
        return endpoint
    if parts.scheme == "tcp" and parts.hostname and parts.port:
        host = parts.hostname
        if encrypted or host == "localhost":
            return endpoint
        try:
            if ipaddress.ip_address(host).is_loopback:
                return endpoint
        except ValueError:
            pass
        raise EndpointError(
            f"{endpoint} leaves this machine and the link is not encrypted; "
            "use a loopback address, or give both ends CURVE keys (paceline keys curve)"
        )
    raise EndpointError(f"{endpoint!r} is not an address like tcp://127.0.0.1:5557 or ipc:///path")


def learner_endpoints(base: str, *, encrypted: bool = False) -> tuple[str, str]:
    """(traces, control) of a learner bound at ``base``: two ports, or two socket files."""
    check_endpoint(base, encrypted=encrypted)
    parts = urlsplit(base)
    if parts.scheme == "tcp":
        if parts.port == 65535:
            raise EndpointError(f"{base} leaves no port above it for control; choose a lower one")
        return base, f"tcp://{parts.hostname}:{(parts.port or 0) + 1}"
    return f"{base}.traces", f"{base}.control"


def open_socket(
    context: zmq.Context[Socket],
    kind: int,
    endpoint: str,
    *,
    bind: bool,
    high_water: int = 256,
    max_frame_bytes: int = MAX_FRAME_BYTES,
    curve: Curve | None = None,
) -> Socket:
    """A socket that never lingers at exit. Raises EndpointError when the address cannot be bound."""
    check_endpoint(endpoint, encrypted=curve is not None)
    socket = context.socket(kind)
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.SNDHWM, high_water)
    socket.setsockopt(zmq.RCVHWM, high_water)
    socket.setsockopt(zmq.MAXMSGSIZE, max_frame_bytes)
    socket.setsockopt(zmq.RECONNECT_IVL, 100)
    socket.setsockopt(zmq.RECONNECT_IVL_MAX, 2000)
    if kind == zmq.PUSH:
        # Queue only for a peer that is there: with none, a send says so at once.
        socket.setsockopt(zmq.IMMEDIATE, 1)
    if curve is not None:
        curve.secure(socket)
    try:
        if bind:
            socket.bind(endpoint)
            _keep_private(endpoint)
        else:
            socket.connect(endpoint)
    except zmq.ZMQError as error:
        socket.close()
        raise EndpointError(
            f"cannot {'bind' if bind else 'connect to'} {endpoint}: {error}"
        ) from None
    return socket


def _keep_private(endpoint: str) -> None:
    if endpoint.startswith("ipc://"):
        path = Path(endpoint.removeprefix("ipc://"))
        if path.exists():
            os.chmod(path, 0o600)


def send(socket: zmq.Socket[Any], frames: Sequence[Frame]) -> bool:
    """Send without blocking and without copying large frames; False when the queue is full."""
    try:
        socket.send_multipart(frames, flags=zmq.NOBLOCK, copy=False)
    except zmq.Again:
        return False
    except zmq.ZMQError as error:
        if error.errno == zmq.EHOSTUNREACH:
            return False
        raise
    return True


def receive(socket: zmq.Socket[Any]) -> list[memoryview] | None:
    """The next message's frames, or None when there is none."""
    try:
        frames = socket.recv_multipart(flags=zmq.NOBLOCK, copy=False)
    except zmq.Again:
        return None
    return [frame.buffer for frame in frames]
