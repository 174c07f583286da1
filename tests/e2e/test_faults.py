"""Bad input and faults, each against real processes: one clear line, or a refusal that is counted."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import msgspec
import psutil
import pytest
import torch
import zmq
from safetensors.torch import load_file, save

from clients.process import ServerProcess, console_script, free_port
from learner.drafters.eagle3 import Eagle3
from learner.target import Target
from rlcore.records import (
    DraftFiles,
    DraftManifest,
    FetchDraft,
    Hello,
    LearnerReport,
    Sampling,
    TensorSpec,
    VerifyTrace,
    decode_learner_message,
    encode,
)
from rlcore.target import model_identity
from rlcore.transport import learner_endpoints, open_socket
from rlcore.weights import WEIGHTS, WeightStore
from tests.conftest import Served
from tests.e2e.tap import two_free_ports, version_files
from tests.learner.tiny import HIDDEN, VOCAB, make_target

pytestmark = pytest.mark.slow

PREFIX = "paceline: "


# --- a start that cannot succeed ---


def start_fails(*flags: str, deadline_s: float = 120.0) -> str:
    """The one line of a ``paceline serve`` that ends by itself, before any engine."""
    done = subprocess.run(
        [str(console_script()), "serve", *flags],
        stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=deadline_s, check=False,
        env={**os.environ, "HF_HUB_DISABLE_PROGRESS_BARS": "1"},
    )  # fmt: skip
    everything = done.stdout + done.stderr
    assert done.returncode == 2, everything
    assert "Traceback" not in everything
    assert "EngineCore" not in everything
    lines = [line for line in done.stderr.splitlines() if line.startswith(PREFIX)]
    assert len(lines) == 1, everything
    assert done.stderr.splitlines()[-1] == lines[0]
    return lines[0].removeprefix(PREFIX)


def home_flags(tmp_path: Path, target: Path | str) -> list[str]:
    return [
        "--home", str(tmp_path / "home"), "--target", str(target), "--port", str(free_port()),
        "--learner", "off",
    ]  # fmt: skip


@pytest.mark.on_server("eagle3")
def test_a_second_server_on_the_same_home_is_refused_by_name(served: Served) -> None:
    line = start_fails("--home", str(served.server.home), "--port", str(free_port()))
    assert str(served.server.home) in line
    assert "in use" in line
    assert str(served.server.pid) in line
    assert "--home" in line


def test_a_port_in_use_is_said_before_anything_is_loaded(tmp_path: Path, embedded_model: Path):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        flags = home_flags(tmp_path, embedded_model)
        line = start_fails(*flags, "--port", str(port))
    assert str(port) in line
    assert "--port" in line


def test_an_unknown_model_is_one_line_that_names_it(tmp_path: Path) -> None:
    line = start_fails(*home_flags(tmp_path, "nobody/no-such-model"))
    assert "nobody/no-such-model" in line
    assert "local folder" in line


def test_a_missing_folder_and_one_without_a_model_are_one_line(tmp_path: Path) -> None:
    line = start_fails(*home_flags(tmp_path, tmp_path / "nowhere"))
    assert str(tmp_path / "nowhere") in line
    (tmp_path / "empty").mkdir()
    line = start_fails(*home_flags(tmp_path, tmp_path / "empty"))
    assert "config.json" in line


def test_a_draft_that_does_not_fit_is_one_line_that_says_why(tmp_path: Path, embedded_model: Path):
    target = Target.open(embedded_model)
    flags = home_flags(tmp_path, embedded_model)

    other = tmp_path / "other"
    Eagle3.build(target, vocab_size=512).save(other)
    manifest = DraftManifest(0, None, "eagle3", "", "another-model-0123", 0, "learned")
    (other / "manifest.json").write_bytes(msgspec.json.encode(manifest))
    line = start_fails(*flags, "--draft", str(other))
    assert "another-model-0123" in line
    assert model_identity(embedded_model) in line

    make_target(tmp_path / "tiny")
    Eagle3.build(Target.open(tmp_path / "tiny"), vocab_size=40).save(tmp_path / "narrow")
    line = start_fails(*flags, "--draft", str(tmp_path / "narrow"))
    assert f"hidden size {HIDDEN}" in line

    missing = start_fails(*flags, "--draft", str(tmp_path / "nothing"))
    assert str(tmp_path / "nothing") in missing


# --- a learner that is sent nonsense ---


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
        frames = [torch.ones(spec.shape).numpy().tobytes() for spec in trace.tensors]
        return [encode(trace), *frames]

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
        learner.control.send(encode(Hello(target_id, 0, "eagle3", 3, 0, 0)))
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
    stranger = Hello("another-target", 0, "eagle3", 3, 7, 7)
    for frame in (b"\xff", b"", encode(stranger)):
        learner.control.send(frame)
    learner.control.send_multipart([encode(DraftFiles(9, ["a"], [1])), b"xx"])
    after = learner.until(lambda r: sum(r.rejected.values()) >= sum(before.rejected.values()) + 3)
    gained = {k: n - before.rejected.get(k, 0) for k, n in after.rejected.items()}
    assert {k: n for k, n in gained.items() if n} == {"malformed": 2, "hello_target": 1}
    learner.traces.send_multipart(learner.good())
    assert learner.until(lambda r: r.received > before.received).received == before.received + 1


# --- weights that must not go live ---


def greedy(served: Served) -> str:
    answer = served.openai.completions.create(
        model=served.model, prompt="The sea is", max_tokens=12, temperature=0.0
    )
    return answer.choices[0].text


def failed_swaps(served: Served) -> dict[str, float]:
    found = {}
    for line in served.server.get("/metrics").text.splitlines():
        if line.startswith("paceline_failed_swaps_total{"):
            found[line.split('"')[1]] = float(line.rsplit(" ", 1)[1])
    return found


def store_version(served: Served, kind: str) -> tuple[int, str, str]:
    """Put a bad version into the server's store: (version, reason it is counted by, word of why)."""
    store = served.store
    version = store.versions()[-1] + 1
    live = served.server.status()["draft"]["live"]
    manifest = msgspec.structs.replace(store.manifest(live), version=version, parent=live)
    tensors = load_file(store.folder(live) / WEIGHTS)
    config = json.loads((store.folder(live) / "config.json").read_text())
    reason, word = kind, "refused"
    if kind == "not_finite":
        tensors["fc.weight"][3, 4] = torch.nan
        word = "fc.weight"
    elif kind == "shape":
        tensors["fc.weight"] = tensors["fc.weight"][:, :-1].contiguous()
        word = "fc.weight"
    elif kind == "missing":
        del tensors["norm.weight"]
        reason, word = "shape", "norm.weight"
    elif kind == "target":
        manifest = msgspec.structs.replace(manifest, target_id="another-model")
        word = "another-model"
    store.publish(tensors, config, manifest)
    path = store.folder(version) / WEIGHTS
    if kind == "truncated":
        path.write_bytes(path.read_bytes()[:100])
    elif kind == "digest":
        content = bytearray(path.read_bytes())
        content[-1000] ^= 1
        path.write_bytes(content)
    elif kind == "cut":
        path.write_bytes(path.read_bytes()[:-1000])
        reason = "digest"
    return version, reason, word


@pytest.mark.on_server("eagle3")
@pytest.mark.parametrize(
    "kind", ["truncated", "cut", "digest", "not_finite", "shape", "missing", "target"]
)
def test_a_bad_version_is_refused_counted_and_the_old_one_serves_on(
    served: Served, kind: str
) -> None:
    before, text, counted = served.server.status(), greedy(served), failed_swaps(served)
    version, reason, word = store_version(served, kind)
    answer = served.server.post(f"/v1/paceline/drafts/{version}/activate")
    assert answer.status_code == 409
    message = answer.json()["error"]["message"]
    assert f"version {version} was refused" in message
    assert word in message
    after = failed_swaps(served)
    assert after.pop(reason) == counted.pop(reason, 0) + 1
    assert after == counted
    assert served.server.status()["draft"] == before["draft"]
    assert greedy(served) == text


@pytest.mark.on_server("eagle3")
def test_an_unknown_version_is_not_found(served: Served) -> None:
    assert served.server.post("/v1/paceline/drafts/99999/activate").status_code == 404
    assert served.server.post("/v1/paceline/drafts/one/activate").status_code == 400


@pytest.mark.on_server("eagle3")
def test_an_announced_version_goes_live_only_if_its_files_are_good(served: Served) -> None:
    text = greedy(served)
    live = served.server.status()["draft"]["live"]
    top = served.store.versions()[-1]
    manifest, files = version_files(served.store.folder(live), version=top + 1, parent=live)

    tampered = bytearray(files[WEIGHTS])
    tampered[-1000] ^= 1
    for bad in (
        {**files, WEIGHTS: bytes(tampered)},
        {**files, WEIGHTS: files[WEIGHTS][:1000]},
        {**files, "config.json": b"{"},
        {**files, "manifest.json": b"[]"},
    ):
        verdict = served.tap.announce(manifest, bad)
        assert not verdict.live
        assert verdict.error
        assert verdict.live_version == live
        assert top + 1 not in served.store.versions()

    tensors = load_file(served.store.folder(live) / WEIGHTS)
    tensors["midlayer.mlp.up_proj.weight"] *= 1.01
    content = save(tensors)
    verdict = served.tap.announce(manifest, {**files, WEIGHTS: content})
    assert not verdict.live  # the manifest still names the old digest
    good, good_files = with_weights(served, top + 2, live, content)
    assert served.tap.announce(good, good_files).live
    status = served.server.status()["draft"]
    assert (status["live"], status["previous"]) == (top + 2, live)
    assert greedy(served) == text
    assert served.server.post("/v1/paceline/drafts/rollback").json()["live"] == live
    assert greedy(served) == text


def with_weights(
    served: Served, version: int, parent: int, content: bytes
) -> tuple[DraftManifest, dict[str, bytes]]:
    import hashlib

    manifest, files = version_files(
        served.store.folder(parent), version=version, parent=parent, origin="learned",
        sha256=hashlib.sha256(content).hexdigest(),
    )  # fmt: skip
    return manifest, {**files, WEIGHTS: content}


# --- a learner that dies ---


@pytest.mark.on_server("learning")
def test_a_killed_learner_costs_no_request_and_resumes(served: Served) -> None:
    server, home = served.server, served.server.home
    load = Load(server)
    try:
        first = until(server, lambda s: s["learner"].get("updates", 0) > 0, 240, load)
        wait_for(lambda: checkpointed_tokens(home) > 0, 60)
        saved = checkpointed_tokens(home)
        pid = first["learner"]["pid"]
        assert pid in [process.pid for process in server.children()]
        done_before = load.done
        psutil.Process(pid).send_signal(signal.SIGKILL)
        after = until(
            server,
            lambda s: s["learner"]["pid"] != pid and s["learner"]["tokens_seen"] > saved,
            120,
            load,
        )
    finally:
        load.stop()
    assert after["learner"]["received"] >= first["learner"]["received"] > 0
    assert load.failures == []
    assert load.done > done_before


def checkpointed_tokens(home: Path) -> int:
    """Trained positions in the newest checkpoint; 0 while there is none."""
    from rlcore.checkpoint import CheckpointError, load_checkpoint

    folder = next((home / "learner").glob("*/checkpoint"), None)
    try:
        found = load_checkpoint(folder) if folder else None
    except CheckpointError:
        return 0
    return 0 if found is None else int(found[1]["tokens_seen"])


def wait_for(true: Callable[[], bool], deadline_s: float) -> None:
    end = time.monotonic() + deadline_s
    while not true():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.3)


def until(
    server: ServerProcess, true: Callable[[dict[str, Any]], bool], deadline_s: float, load: Load
) -> dict[str, Any]:
    """The server's status, once this holds."""
    end = time.monotonic() + deadline_s
    while not true(status := server.status()):
        assert time.monotonic() < end, f"not in time: {status['learner']}\n{server.tail()}"
        assert load.failures == []
        time.sleep(0.3)
    return status


class Load:
    """Three clients that ask on and on; ``failures`` holds what went wrong."""

    def __init__(self, server: ServerProcess) -> None:
        self.failures: list[str] = []
        self.done = 0
        self._server = server
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._ask, args=(i,)) for i in range(3)]
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(60)

    def _ask(self, client: int) -> None:
        asked = 0
        while not self._stop.is_set():
            asked += 1
            body = {
                "model": "SmolLM2-135M-Instruct", "prompt": f"Story {client} {asked}: once",
                "max_tokens": 40, "ignore_eos": True,
            }  # fmt: skip
            try:
                answer = self._server.post("/v1/completions", body)
                if answer.status_code != 200 or not answer.json()["choices"][0]["text"]:
                    self.failures.append(answer.text)
                self.done += 1
            except httpx.HTTPError as error:
                self.failures.append(repr(error))
