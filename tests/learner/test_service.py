"""The learner and a server that says hello, gives weights and answers: what is asked, and how often."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from unittest import mock

import pytest
import torch
import zmq

from learner import service
from learner.drafters.eagle3 import Eagle3
from learner.service import Learner
from learner.target import Target
from rlcore.records.learner_link import (
    DraftFiles,
    FetchDraft,
    Hello,
    LearnerMessage,
    Verdict,
    decode_learner_message,
)
from rlcore.records.versions import DraftManifest
from rlcore.records.wire import encode
from rlcore.settings import LearnSettings
from rlcore.transport import learner_endpoints, open_socket
from rlcore.weights import CONFIG, MANIFEST, WEIGHTS, WeightStore
from tests.learner.tiny import make_target

torch.set_num_threads(1)


@pytest.fixture(scope="module")
def target(tmp_path_factory) -> Target:
    folder = tmp_path_factory.mktemp("target")
    make_target(folder)
    return Target.open(folder)


class Server:
    """Its side of the link, and the learner that it talks to."""

    def __init__(self, target: Target, folder: Path) -> None:
        self.store = WeightStore(folder / "server")
        self._settings = LearnSettings(checkpoint_interval_s=1e6)
        self._folder, self._target = folder, target
        self._context: zmq.Context = zmq.Context()
        self.start()

    def start(self) -> None:
        base = f"ipc://{self._folder}/s"
        self.learner = Learner(self._settings, self._folder / "learner", self._target, "tiny", base)
        self.socket = open_socket(self._context, zmq.DEALER, learner_endpoints(base)[1], bind=False)

    def stop(self) -> None:
        self.learner._inbox.close()
        self.socket.close()

    def close(self) -> None:
        self.stop()
        self._context.destroy(linger=0)

    def publish(self, version: int, head: Eagle3, **config: object) -> None:
        tensors, found = head.export()
        manifest = DraftManifest(
            version=version, parent=None, method="eagle3", sha256="", target_id="tiny",
            target_version=0, origin="given",
        )  # fmt: skip
        self.store.publish(tensors, found | config, manifest)

    def tell(
        self, message: LearnerMessage, files: list[bytes] | None = None
    ) -> list[LearnerMessage]:
        """Send it, have the learner take a turn, and give back what it asks for."""
        self.socket.send_multipart([encode(message), *(files or [])])
        self.learner._inbox.wait(5000)
        self.learner.turn()
        answers: list[LearnerMessage] = []
        while self.socket.poll(50):
            answers.append(decode_learner_message(self.socket.recv_multipart()[0]))
        return [a for a in answers if isinstance(a, FetchDraft)]

    def hello(self, version: int) -> list[LearnerMessage]:
        digest = self.store.manifest(version).sha256
        k = self._settings.speculative_tokens
        return self.tell(Hello("tiny", 0, "eagle3", k, version, digest, version))

    def give(self, version: int) -> None:
        files = self.store.files(version)
        sizes = [len(content) for content in files.values()]
        self.tell(DraftFiles(version, list(files), sizes), list(files.values()))

    @property
    def live(self) -> int | None:
        found = self.learner._course.live
        return None if found is None else found.version


@pytest.fixture
def server(target, tmp_path) -> Iterator[Server]:
    found = Server(target, tmp_path)
    yield found
    found.close()


def flipped(content: bytes) -> bytes:
    return content[:-100] + bytes([content[-100] ^ 64]) + content[-99:]


DAMAGE: dict[str, tuple[str, Callable[[bytes], bytes]]] = {
    "weights cut off": (WEIGHTS, lambda content: content[: len(content) // 2]),
    "a bit of the weights flipped": (WEIGHTS, flipped),
    "an empty config": (CONFIG, lambda _: b""),
    "a config of something else": (CONFIG, lambda _: b"{}"),
    "a manifest that is no JSON": (MANIFEST, lambda _: b"\0"),
}


@pytest.mark.parametrize("damage", [*DAMAGE, "no weights"])
def test_damaged_weights_are_fetched_again_and_not_at_every_hello(server, target, damage):
    server.publish(0, Eagle3.build(target, vocab_size=40))
    assert server.hello(0) == [FetchDraft(0)]
    server.give(0)
    assert server.live == 0
    server.stop()
    folder = server.learner._store.folder(0)
    if damage == "no weights":
        (folder / WEIGHTS).unlink()
    else:
        name, damaged = DAMAGE[damage]
        (folder / name).write_bytes(damaged((folder / name).read_bytes()))
    server.start()
    assert [server.hello(0) for _ in range(4)] == [[FetchDraft(0)], [], [], []]
    assert server.live is None
    assert not folder.exists()
    server.give(0)
    assert server.live == 0
    assert server.hello(0) == []
    assert server.learner._store.files(0) == server.store.files(0)


def test_whole_weights_that_cannot_be_learned_from_are_fetched_once(server, target):
    server.publish(0, Eagle3.build(target, vocab_size=40), attention_bias=True)
    server.publish(1, Eagle3.build(target, vocab_size=40))
    with mock.patch.object(service, "FETCH_INTERVAL", 0.0):
        assert server.hello(0) == [FetchDraft(0)]
        server.give(0)
        assert [server.hello(0) for _ in range(3)] == [[], [], []]
        assert server.live is None
        assert server.hello(1) == [FetchDraft(1)]
        server.give(1)
    assert server.live == 1


def test_the_course_hears_what_a_server_did_with_a_version(server, target):
    server.publish(0, Eagle3.build(target, vocab_size=40))
    server.hello(0)
    server.give(0)
    course = server.learner._course
    with mock.patch.multiple(course, serves=mock.DEFAULT, refused=mock.DEFAULT) as heard:
        server.hello(0)
        server.tell(Verdict(version=6, live=True, live_version=6, seconds=0.1))
        assert heard["refused"].mock_calls == []
        server.tell(Verdict(version=7, live=False, live_version=6, error="no"))
    assert heard["serves"].mock_calls == [mock.call(0), mock.call(6), mock.call(6)]
    assert heard["refused"].mock_calls == [mock.call(7)]
