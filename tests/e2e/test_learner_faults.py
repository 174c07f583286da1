"""Nonsense sent to a real learner is counted by reason and dropped."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import msgspec
import pytest
import torch
import zmq

from clients.process import console_script
from learner.drafters.eagle3 import Eagle3
from learner.target import Target
from rlcore.records.learner_link import (
    DraftFiles,
    FetchDraft,
    Hello,
    LearnerReport,
    decode_learner_message,
)
from rlcore.records.trace import Sampling, VerifyTrace
from rlcore.records.versions import DraftManifest
from rlcore.records.wire import TensorSpec, encode
from rlcore.target import model_identity
from rlcore.transport import learner_endpoints, open_socket
from rlcore.weights import WeightStore
from tests.e2e.tap import two_free_ports
from tests.learner.tiny import HIDDEN, VOCAB, make_target

pytestmark = pytest.mark.slow


@dataclass
class LearnerUnderTest:
    """A real ``paceline learn`` on a tiny target, with the test as its server."""

    process: subprocess.Popen[bytes]
    traces: zmq.Socket[bytes]
    control: zmq.Socket[bytes]
    target: Target
    sent: int = 0

    def report(self) -> LearnerReport:
        """The next report."""
        end = time.monotonic() + 30
        while time.monotonic() < end:
            if self.control.poll(500):
                message = decode_learner_message(self.control.recv_multipart()[0])
                if isinstance(message, LearnerReport):
                    return message
        raise TimeoutError("no report from the learner")

    def until(self, true: Callable[[LearnerReport], bool]) -> LearnerReport:
        """The first report of which this holds; the last one if none does in time."""
        end = time.monotonic() + 30
        while not true(report := self.report()) and time.monotonic() < end:
            pass
        return report

    def good(self) -> list[bytes]:
        """A trace that fits; each one is of a request of its own."""
        self.sent += 1
        rows = 12
        trace = VerifyTrace(
            request_id=f"r{self.sent}", tenant="default", target_version=0, span_index=0,
            final=True, first_position=0, prompt_length=4, prompt_hash="f" * 32,
            token_ids=[5] * (rows + 1), sampling=Sampling(), grammar=False, steps=[],
            tensors=[
                TensorSpec("aux", "float32", (rows, 3 * HIDDEN)),
                TensorSpec("last", "float32", (rows, HIDDEN)),
                TensorSpec("logsumexp", "float32", (rows,)),
            ],
        )  # fmt: skip
        aux, last = torch.ones(rows, 3 * HIDDEN), torch.ones(rows, HIDDEN)
        lse = torch.logsumexp(last @ self.target.lm_head.T, dim=-1)
        return [encode(trace), *(tensor.numpy().tobytes() for tensor in (aux, last, lse))]

    def changed(self, **fields: Any) -> list[bytes]:
        header, *frames = self.good()
        trace = msgspec.structs.replace(msgspec.msgpack.decode(header, type=VerifyTrace), **fields)
        return [encode(trace), *frames]


@pytest.fixture(scope="module")
def learner(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LearnerUnderTest]:
    folder = tmp_path_factory.mktemp("learner")
    make_target(folder / "tiny")
    target = Target.open(folder / "tiny")
    target_id = model_identity(folder / "tiny")
    store = WeightStore(folder / "store")
    tensors, config = Eagle3.build(target, vocab_size=40).export()
    store.publish(tensors, config, DraftManifest(0, None, "eagle3", "", target_id, 0, "untrained"))
    base = f"tcp://127.0.0.1:{two_free_ports()}"
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    traces, control = learner_endpoints(base)
    command = [
        str(console_script()), "learn", "--home", str(folder / "home"), "--bind", base,
        "--target", str(folder / "tiny"),
    ]  # fmt: skip
    with open(folder / "log", "wb") as log:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
        )
    try:
        found = LearnerUnderTest(
            process,
            open_socket(context, zmq.PUSH, traces, bind=False),
            open_socket(context, zmq.DEALER, control, bind=False),
            target,
        )
        introduce(found, store, target_id)
        yield found
    finally:
        process.kill()
        process.wait(10)
        context.destroy(linger=0)


def introduce(learner: LearnerUnderTest, store: WeightStore, target_id: str) -> None:
    """As a server: hello until it asks for the live draft, which it then gets."""
    end = time.monotonic() + 60
    while time.monotonic() < end:
        learner.control.send(
            encode(Hello(target_id, 0, "eagle3", 3, 0, store.manifest(0).sha256, 0))
        )
        if not learner.control.poll(1000):
            continue
        message = decode_learner_message(learner.control.recv_multipart()[0])
        if isinstance(message, FetchDraft):
            files = store.files(message.version)
            sizes = [len(content) for content in files.values()]
            head = encode(DraftFiles(message.version, list(files), sizes))
            learner.control.send_multipart([head, *files.values()])
            return
    raise TimeoutError("the learner did not ask for the live draft")


def nonsense(learner: LearnerUnderTest) -> list[tuple[str, list[bytes]]]:
    """(reason it must be counted under, message)."""
    header, aux, last, lse = learner.good()
    nan = torch.full((12, HIDDEN), torch.nan).numpy().tobytes()
    long = VerifyTrace.SPAN_TENSORS
    return [
        ("malformed", [b"\xff\x00garbage"]),
        ("malformed", learner.changed(prompt_hash="no number")),
        ("malformed", learner.changed(first_position=2**40, prompt_length=2**40 + 1)),
        ("malformed", [b""]),
        ("malformed", [b"{}", b"x" * 1000]),
        ("malformed", [encode(LearnerReport(pid=1, phase="lost")), aux]),
        ("malformed", learner.changed(request_id="x" * 300)),
        ("malformed", learner.changed(token_ids=[-1] * 13)),
        ("malformed", [header[: len(header) // 2], aux, last, lse]),
        ("oversized", [b"\x00" * (8 * 1024 * 1024 + 1)]),
        ("schema", learner.changed(schema=2)),
        ("frames", [header, aux, last]),
        ("frames", [header, aux, last[:-4], lse]),
        ("frames", [header, aux, last, lse, b""]),
        ("tensors", learner.changed(tensors=[TensorSpec(n, "float32", (99, 1)) for n in long])),
        ("tensors", learner.changed(tensors=[TensorSpec("last", "float64", (12, HIDDEN))])),
        ("tensors", learner.changed(tensors=[TensorSpec("secret", "float32", (12, HIDDEN))])),
        ("tensors", wrong_width(learner)),
        ("tokens", learner.changed(token_ids=[VOCAB] * 13)),
        ("target_version", learner.changed(target_version=1)),
        ("not_finite", [header, aux, nan, lse]),
        ("nothing_new", learner.changed(prompt_length=13)),
        ("logsumexp", [*learner.good()[:3], torch.full((12,), 3.0).numpy().tobytes()]),
    ]


def wrong_width(learner: LearnerUnderTest) -> list[bytes]:
    tensors = [
        TensorSpec("aux", "float32", (12, 3 * HIDDEN)),
        TensorSpec("last", "float32", (12, HIDDEN + 1)),
        TensorSpec("logsumexp", "float32", (12,)),
    ]
    header, *_ = learner.changed(tensors=tensors)
    return [header, *(bytes(spec.nbytes) for spec in tensors)]


def test_nonsense_sent_to_a_learner_is_counted_by_reason_and_dropped(
    learner: LearnerUnderTest,
) -> None:
    before = learner.report()
    wanted: dict[str, int] = dict(before.rejected)
    messages = nonsense(learner)
    for reason, frames in messages:
        wanted[reason] = wanted.get(reason, 0) + 1
        assert learner.traces.poll(5000, zmq.POLLOUT)
        learner.traces.send_multipart(frames)
    learner.traces.send_multipart(learner.good())
    after = learner.until(lambda r: r.received > before.received)
    assert after.rejected == wanted
    assert after.received == before.received + 1
    assert learner.process.poll() is None


def test_nonsense_on_the_control_link_is_counted_and_dropped(learner: LearnerUnderTest) -> None:
    before = learner.report()
    stranger = Hello("another-target", 0, "eagle3", 3, 7, "0" * 64, 7)
    for frame in (b"\xff", b"", encode(stranger)):
        learner.control.send(frame)
    learner.control.send_multipart([encode(DraftFiles(9, ["a"], [1])), b"xx"])
    after = learner.until(lambda r: sum(r.rejected.values()) >= sum(before.rejected.values()) + 4)
    gained = {k: n - before.rejected.get(k, 0) for k, n in after.rejected.items()}
    assert {k: n for k, n in gained.items() if n} == {
        "malformed": 2,
        "hello_target": 1,
        "unasked": 1,
    }
    learner.traces.send_multipart(learner.good())
    assert learner.until(lambda r: r.received > before.received).received == before.received + 1
