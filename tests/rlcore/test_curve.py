"""With CURVE keys only listed peers come through, on real sockets; without them none leaves here."""

from __future__ import annotations

import stat
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import zmq

from rlcore.curve import (
    CurveClient,
    CurveError,
    CurveServer,
    curve_client,
    curve_server,
    make_pair,
    read_pair,
    read_public,
)
from rlcore.transport import (
    EndpointError,
    check_endpoint,
    learner_endpoints,
    open_socket,
    receive,
    send,
)
from tests.e2e.tap import two_free_ports

KINDS = [(zmq.PULL, zmq.PUSH), (zmq.ROUTER, zmq.DEALER)]


@dataclass
class Keys:
    """A learner's pair, and those of two servers, only one of which it knows."""

    folder: Path

    def __post_init__(self) -> None:
        for name in ("learner", "known", "stranger"):
            make_pair(self.folder / name)

    def server(self) -> CurveServer:
        found = curve_server(self.folder / "learner", self.folder / "known.pub")
        assert found is not None
        return found

    def client(self, name: str, server: str = "learner") -> CurveClient:
        found = curve_client(self.folder / name, self.folder / f"{server}.pub")
        assert found is not None
        return found


@pytest.fixture(scope="module")
def keys(tmp_path_factory) -> Keys:
    return Keys(tmp_path_factory.mktemp("curve"))


@pytest.fixture
def contexts() -> Iterator[Callable[[], zmq.Context]]:
    made: list[zmq.Context] = []

    def make() -> zmq.Context:
        made.append(zmq.Context())
        return made[-1]

    yield make
    for context in made:
        context.destroy(linger=0)


def arrives(bound: zmq.Socket, connected: zmq.Socket, wait_s: float) -> bool:
    """Whether what is sent on one comes out of the other, within the time."""
    end = time.monotonic() + wait_s
    while time.monotonic() < end:
        send(connected, [b"hello"])
        if bound.poll(50):
            frames = receive(bound)
            assert frames is not None
            assert bytes(frames[-1]) == b"hello"
            return True
    return False


@pytest.mark.parametrize(("bound", "connected"), KINDS)
def test_a_listed_peer_comes_through_and_no_other_does(keys, contexts, bound, connected):
    curve = keys.server()
    context = contexts()
    endpoint = f"tcp://127.0.0.1:{two_free_ports()}"
    inside = open_socket(context, bound, endpoint, bind=True, curve=curve)
    try:
        strangers = {
            "unknown": keys.client("stranger"),
            "of another server": keys.client("known", server="stranger"),
            "without keys": None,
        }
        for name, theirs in strangers.items():
            outside = open_socket(contexts(), connected, endpoint, bind=False, curve=theirs)
            assert not arrives(inside, outside, 0.7), name
        listed = open_socket(
            contexts(), connected, endpoint, bind=False, curve=keys.client("known")
        )
        assert arrives(inside, listed, 10.0)
        for _ in range(50):  # what was on its way from the strangers would be here by now
            found = receive(inside)
            assert found is None or bytes(found[-1]) == b"hello"
    finally:
        curve.stop()


def test_a_peer_that_knows_the_public_key_only_gets_nothing_said(keys, contexts):
    """The control socket talks back; to a stranger it does not."""
    curve = keys.server()
    endpoint = f"tcp://127.0.0.1:{two_free_ports()}"
    inside = open_socket(contexts(), zmq.ROUTER, endpoint, bind=True, curve=curve)
    try:
        outside = open_socket(
            contexts(), zmq.DEALER, endpoint, bind=False, curve=keys.client("stranger")
        )
        outside.setsockopt(zmq.IMMEDIATE, 1)
        assert not arrives(inside, outside, 0.5)
        assert not outside.poll(300)
    finally:
        curve.stop()


@pytest.mark.parametrize(
    "endpoint", ["tcp://10.0.0.7:5557", "tcp://learner.example:5557", "tcp://0.0.0.0:5557"]
)
def test_an_address_of_another_machine_needs_keys(keys, contexts, endpoint):
    with pytest.raises(EndpointError, match="paceline keys curve"):
        check_endpoint(endpoint)
    with pytest.raises(EndpointError, match="paceline keys curve"):
        open_socket(contexts(), zmq.PUSH, endpoint, bind=False)
    assert check_endpoint(endpoint, encrypted=True) == endpoint
    assert learner_endpoints(endpoint, encrypted=True)[1].endswith(":5558")


def test_a_pair_is_its_owners_and_reads_back(tmp_path):
    public = make_pair(tmp_path / "a")
    assert stat.S_IMODE((tmp_path / "a").stat().st_mode) == 0o600
    assert read_pair(tmp_path / "a").public.decode() == public
    assert read_public(tmp_path / "a.pub") == [public.encode()]
    secret = read_pair(tmp_path / "a").secret
    assert secret not in (tmp_path / "a.pub").read_bytes()
    with pytest.raises(CurveError, match="never written over"):
        make_pair(tmp_path / "a")
    (tmp_path / "a").chmod(0o640)
    with pytest.raises(CurveError, match="chmod 600"):
        read_pair(tmp_path / "a")


def test_a_list_of_peers_is_one_key_in_a_line_with_a_name_behind_it(tmp_path):
    one, two = make_pair(tmp_path / "a"), make_pair(tmp_path / "b")
    (tmp_path / "peers").write_text(f"{one}  the first server\n\n{two}\n")
    assert read_public(tmp_path / "peers") == [one.encode(), two.encode()]
    make_pair(tmp_path / "own")
    with pytest.raises(CurveError, match="holds 2 public keys"):
        curve_client(tmp_path / "own", tmp_path / "peers")


@pytest.mark.parametrize("content", ["", "short\n", "x" * 41 + "\n", "~" * 40 + "\n", "\xff\n"])
def test_a_file_without_keys_is_refused(tmp_path, content):
    (tmp_path / "peers").write_text(content)
    with pytest.raises(CurveError):
        read_public(tmp_path / "peers")
