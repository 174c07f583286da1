"""A trace stream is kept by a real recorder, and learned from again, the same every time."""

from __future__ import annotations

import hashlib
import json
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import zmq
from transformers import LlamaForCausalLM

from clients.process import console_script
from learner.recording import Recording
from rlcore.records.learner_link import Hello, LearnerReport, decode_learner_message
from rlcore.records.wire import encode
from rlcore.target import model_identity
from rlcore.transport import learner_endpoints, open_socket
from tests.e2e.tap import two_free_ports
from tests.learner.tiny import make_span, make_target, make_trace

pytestmark = pytest.mark.slow

REQUESTS = 120
SMALL = ["--gate-tokens", "100", "--batch-tokens", "256", "--draft-vocab", "256", "--nice", "0"]


def paceline(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(console_script()), *words, "--home", str(folder / "home"), "--target", str(folder / "tiny")],
        capture_output=True, text=True, timeout=240, check=False,
    )  # fmt: skip


def messages(model: LlamaForCausalLM) -> Iterator[Sequence[bytes]]:
    """Requests of one kind, so that there is something to learn."""
    for number in range(REQUESTS):
        span = make_span(model, 60, 6, seed=number % 5)
        prompt = hashlib.blake2b(str(number).encode(), digest_size=16).hexdigest()
        trace, frames = make_trace(replace(span, request_id=f"r{number}", prompt_hash=prompt))
        yield [encode(trace), *frames]


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a target, and the recording of a made-up server's traces."""
    folder = tmp_path_factory.mktemp("record")
    model = make_target(folder / "tiny")
    target_id = model_identity(folder / "tiny")
    base = f"tcp://127.0.0.1:{two_free_ports()}"
    command = [
        str(console_script()), "record", "--out", str(folder / "tiny.traces"), "--bind", base,
        "--home", str(folder / "home"), "--target", str(folder / "tiny"),
    ]  # fmt: skip
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    traces, control = learner_endpoints(base)
    with open(folder / "log", "wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        sender = open_socket(context, zmq.PUSH, traces, bind=False)
        link = open_socket(context, zmq.DEALER, control, bind=False)
        for frames in messages(model):
            assert sender.poll(60_000, zmq.POLLOUT), "the recorder is not there"
            sender.send_multipart(frames)
        received, end = 0, time.monotonic() + 60
        while received < REQUESTS and time.monotonic() < end:
            link.send(encode(Hello(target_id, 0, "eagle3", 3, 0, "", 0)))
            if link.poll(1000):
                report = decode_learner_message(link.recv_multipart()[0])
                assert isinstance(report, LearnerReport)
                assert report.phase == "recording"
                received = report.received
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0
    finally:
        process.kill()
        context.destroy(linger=0)
    return folder


def test_every_trace_is_in_the_file(recorded: Path) -> None:
    recording = Recording(recorded / "tiny.traces")
    assert recording.records == REQUESTS
    assert [trace.request_id for trace, _ in recording] == [f"r{i}" for i in range(REQUESTS)]


def test_learning_from_it_is_the_same_every_time_and_ends_in_a_drafter(recorded: Path) -> None:
    source = str(recorded / "tiny.traces")
    weights = []
    for name in ("one", "two"):
        done = paceline(
            recorded, "learn", "--replay", source, "--out", str(recorded / name), *SMALL
        )
        assert done.returncode == 0, done.stderr
        weights.append((recorded / name / "model.safetensors").read_bytes())
        facts = json.loads((recorded / name / "rehearsal.json").read_text())
        assert facts["traces"] == REQUESTS
        assert facts["trained_tokens"] > 0
        assert facts["promoted"] > 0
    assert weights[0] == weights[1]
    manifest = json.loads((recorded / "one" / "manifest.json").read_text())
    assert manifest["origin"] == "learned"
    assert manifest["target_id"] == model_identity(recorded / "tiny")


def test_another_seed_learns_another_drafter(recorded: Path) -> None:
    source, out = str(recorded / "tiny.traces"), recorded / "seed"
    done = paceline(recorded, "learn", "--replay", source, "--out", str(out), *SMALL, "--seed", "1")
    assert done.returncode == 0, done.stderr
    first = (recorded / "one" / "model.safetensors").read_bytes()
    assert (out / "model.safetensors").read_bytes() != first


def test_a_recording_that_does_not_fit_leaves_nothing_behind(recorded: Path) -> None:
    whole = (recorded / "tiny.traces").read_bytes()
    cut = recorded / "cut.traces"
    cut.write_bytes(whole[: len(whole) // 2])
    out = recorded / "none"
    for words, said in (
        (["--replay", str(cut)], "was cut off after"),
        (["--replay", str(recorded / "log")], "is no recording of traces"),
        (["--replay", str(recorded / "tiny.traces"), "--method", "draft_model"], "eagle3 drafter"),
    ):
        done = paceline(recorded, "learn", *words, "--out", str(out), *SMALL)
        assert done.returncode == 2
        assert said in done.stderr.strip().splitlines()[-1]
        assert not out.exists()
    other = replace_target(recorded)
    done = paceline(other, "learn", "--replay", str(recorded / "tiny.traces"), "--out", str(out))
    assert done.returncode == 2
    assert "was recorded of tiny-" in done.stderr.strip().splitlines()[-1]
    assert not out.exists()


def test_a_cut_recording_can_be_learned_from_if_asked(recorded: Path) -> None:
    cut, out = recorded / "cut.traces", recorded / "from-cut"
    done = paceline(recorded, "learn", "--replay", str(cut), "--cut-ok", "--out", str(out), *SMALL)
    assert done.returncode == 0, done.stderr
    assert 0 < json.loads((out / "rehearsal.json").read_text())["traces"] < REQUESTS


def replace_target(recorded: Path) -> Path:
    """A folder with another target of the same name."""
    folder = recorded / "other"
    make_target(folder / "tiny", tied=False)
    return folder
