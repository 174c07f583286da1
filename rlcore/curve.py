"""CURVE keys for the links that leave a machine: who the other end is, and nobody else can read along.

ZeroMQ's CURVE (CurveZMQ, RFC 26 of the ZeroMQ project) encrypts and authenticates both ways. The learner
is the server of the handshake and keeps a list of the public keys it takes traces and messages from; a
serving process knows the learner's public key. A peer that is not on the list is turned away in the
handshake, by ZeroMQ's own thread: nothing that it sends is ever received.
"""

from __future__ import annotations

import os
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import zmq
from zmq.auth.thread import ThreadAuthenticator
from zmq.utils import z85

from rlcore.errors import PacelineError

KEY_CHARACTERS = 40
"""Of a key in Z85, as files hold it."""

PUBLIC_SUFFIX = ".pub"

DOMAIN = "paceline"
"""What the authenticator is asked about; it lets nobody into any other."""


class CurveError(PacelineError):
    """Key files that cannot be used."""


@dataclass(frozen=True)
class CurvePair:
    """One party's keys, in Z85."""

    public: bytes
    secret: bytes


@dataclass(frozen=True)
class CurveClient:
    """What the connecting end of a link needs."""

    own: CurvePair
    server: bytes
    """The other end's public key."""

    def secure(self, socket: zmq.Socket[Any]) -> None:
        """Call before ``connect``."""
        socket.curve_serverkey = self.server
        socket.curve_publickey, socket.curve_secretkey = self.own.public, self.own.secret


class CurveServer:
    """What the binding end of a link needs. One for each ZeroMQ context; ``stop`` ends its thread."""

    def __init__(self, own: CurvePair, clients: frozenset[bytes]) -> None:
        self._own = own
        self._clients = clients
        self._authenticator: ThreadAuthenticator | None = None

    def secure(self, socket: zmq.Socket[Any]) -> None:
        """Call before ``bind``."""
        if self._authenticator is None:
            # Without it ZeroMQ would let in whoever knows the public key.
            self._authenticator = ThreadAuthenticator(socket.context)
            self._authenticator.start()
            self._authenticator.configure_curve_callback(DOMAIN, self)
        socket.zap_domain = DOMAIN.encode()
        socket.curve_server = True
        socket.curve_publickey, socket.curve_secretkey = self._own.public, self._own.secret

    def callback(self, domain: str, key: bytes) -> bool:
        """The authenticator asks whether a client with this public key, in Z85, may come in."""
        return key in self._clients

    def stop(self) -> None:
        if self._authenticator is not None:
            self._authenticator.stop()
            self._authenticator = None


Curve = CurveClient | CurveServer


def make_pair(path: Path) -> str:
    """Write a new pair to ``path`` (for its owner's eyes) and its public half beside it.

    Returns the public key. Raises CurveError when the file exists or cannot be written.
    """
    public, secret = zmq.curve_keypair()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            file.write(public + b"\n" + secret + b"\n")
        path.with_name(path.name + PUBLIC_SUFFIX).write_bytes(public + b"\n")
    except FileExistsError:
        raise CurveError(f"{path} exists; a pair is never written over") from None
    except OSError as error:
        raise CurveError(f"cannot write {path}: {error.strerror}") from None
    return public.decode()


def read_pair(path: Path) -> CurvePair:
    """Raises CurveError for a file that is no pair, or that others can read."""
    if stat.S_IMODE(_stat(path).st_mode) & 0o077:
        raise CurveError(f"others can read or write {path}; run: chmod 600 {path}")
    keys = _keys(path)
    if len(keys) != 2 or zmq.curve_public(keys[1]) != keys[0]:
        raise CurveError(f"{path} holds no pair of keys; make one with: paceline keys curve --out")
    return CurvePair(*keys)


def read_public(path: Path) -> list[bytes]:
    """The public keys in a file, one in each line; what follows a key in its line is not read.

    Raises CurveError.
    """
    keys = _keys(path)
    if not keys:
        raise CurveError(f"{path} holds no public key")
    return keys


def curve_client(secret_file: Path | None, server_key_file: Path | None) -> CurveClient | None:
    """None where nothing is configured. Raises CurveError."""
    if secret_file is None or server_key_file is None:
        return None
    servers = read_public(server_key_file)
    if len(servers) != 1:
        raise CurveError(
            f"{server_key_file} holds {len(servers)} public keys, not the learner's one"
        )
    return CurveClient(read_pair(secret_file), servers[0])


def curve_server(secret_file: Path | None, clients_file: Path | None) -> CurveServer | None:
    """None where nothing is configured. Raises CurveError."""
    if secret_file is None or clients_file is None:
        return None
    return CurveServer(read_pair(secret_file), frozenset(read_public(clients_file)))


def _stat(path: Path) -> os.stat_result:
    try:
        return path.stat()
    except OSError as error:
        raise CurveError(f"cannot read {path}: {error.strerror}") from None


def _keys(path: Path) -> list[bytes]:
    try:
        lines = path.read_bytes().split(b"\n")
    except OSError as error:
        raise CurveError(f"cannot read {path}: {error.strerror}") from None
    keys = [line.split()[0] for line in lines if line.strip()]
    for key in keys:
        try:
            whole = len(key) == KEY_CHARACTERS and len(z85.decode(key)) == 32
        except (ValueError, KeyError, UnicodeDecodeError):
            whole = False
        if not whole:
            raise CurveError(f"{path} holds something that is no CURVE key")
    return keys
