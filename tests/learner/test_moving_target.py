"""Under policy learning the target moves: the learner follows, and learns from nothing stale."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

from learner.course import Course
from learner.drafters.eagle3 import Eagle3
from learner.intake import Intake
from learner.live import load_version
from learner.moving_target import FETCH_INTERVAL, MovingTarget
from learner.session import TrainingSession
from learner.target import Target
from rlcore.records.learner_link import FetchTarget, Hello, TargetTensors
from rlcore.records.versions import DraftManifest
from rlcore.records.wire import RecordError, TensorSpec
from rlcore.settings import LearnSettings
from rlcore.target import shared_with_drafters
from rlcore.weights import WeightStore
from tests.learner.tiny import make_span, make_target, make_trace

torch.set_num_threads(1)

SERVER = b"s"


class Inbox:
    def __init__(self) -> None:
        self.told: list[FetchTarget] = []
        self.rejected: list[str] = []

    def tell(self, server: bytes, message: FetchTarget) -> None:
        assert server == SERVER
        self.told.append(message)

    def reject(self, reason: str) -> None:
        self.rejected.append(reason)


def moved_model(folder: Path, tied: bool) -> LlamaForCausalLM:
    """A target, and in ``folder / "moved"`` the same one a bit of learning later."""
    model = make_target(folder, tied=tied)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.2 * torch.randn(parameter.shape, generator=generator) * parameter.std()
    model.save_pretrained(folder / "moved")
    return model


def hello(version: int, sha256: str) -> Hello:
    return Hello("tiny", version, "eagle3", 3, 0, "", 0, sha256)


def answer(folder: Path, version: int) -> tuple[TargetTensors, list[bytes]]:
    """What a server sends."""
    tensors = shared_with_drafters(folder)
    specs = [TensorSpec(name, "float32", tuple(t.shape)) for name, t in tensors.items()]
    return TargetTensors(version, specs), [t.numpy().tobytes() for t in tensors.values()]


class Followed:
    """A MovingTarget and what it told."""

    def __init__(self, folder: Path) -> None:
        self.inbox = Inbox()
        self.moves: list[tuple[Target, int]] = []
        self.base = Target.open(folder)
        self.moving = MovingTarget(self.base, self.inbox, self._moved)  # type: ignore[arg-type]

    def _moved(self, target: Target, version: int) -> None:
        self.moves.append((target, version))


@pytest.mark.parametrize("tied", [True, False])
def test_a_new_version_is_asked_for_once_and_followed(tied, tmp_path):
    model = moved_model(tmp_path, tied)
    followed = Followed(tmp_path)
    assert followed.moving.follow(SERVER, hello(0, ""), 0.0)
    assert not followed.moving.follow(SERVER, hello(3, "a"), 0.0)
    assert not followed.moving.follow(SERVER, hello(3, "a"), 1.0)
    assert followed.inbox.told == [FetchTarget(3)]
    followed.moving.receive(SERVER, *answer(tmp_path / "moved", 3))
    ((target, version),) = followed.moves
    assert version == 3
    assert torch.equal(target.embedding, model.model.embed_tokens.weight)
    assert torch.equal(target.final_norm, model.model.norm.weight)
    assert torch.equal(target.lm_head, model.lm_head.weight)
    assert (target.lm_head is target.embedding) == tied
    assert followed.moving.follow(SERVER, hello(3, "a"), 2.0)
    # The same number with other weights is another version; the server's own needs no asking.
    assert not followed.moving.follow(SERVER, hello(3, "b"), 2.0)
    assert followed.inbox.told == [FetchTarget(3)] * 2
    assert followed.moving.follow(SERVER, hello(0, ""), 3.0)
    assert followed.moves[1] == (followed.base, 0)


def test_a_version_that_cannot_be_had_is_asked_for_again_in_a_while(tmp_path):
    make_target(tmp_path)
    followed = Followed(tmp_path)
    followed.moving.follow(SERVER, hello(3, "a"), 0.0)
    followed.moving.receive(SERVER, TargetTensors(3, error="gone"), [])
    assert not followed.moving.follow(SERVER, hello(3, "a"), 0.5 * FETCH_INTERVAL)
    assert len(followed.inbox.told) == 1
    assert not followed.moving.follow(SERVER, hello(3, "a"), FETCH_INTERVAL)
    assert len(followed.inbox.told) == 2
    assert followed.moves == []


def test_an_answer_that_does_not_fit_is_counted_and_nothing_moves(tmp_path):
    moved_model(tmp_path, tied=True)
    followed = Followed(tmp_path)
    message, frames = answer(tmp_path / "moved", 3)
    followed.moving.receive(SERVER, message, frames)
    followed.moving.follow(SERVER, hello(3, "a"), 0.0)
    followed.moving.receive(b"other", message, frames)
    followed.moving.receive(SERVER, answer(tmp_path, 2)[0], frames)
    assert followed.inbox.rejected == ["unasked"] * 3
    nan = torch.full((len(frames[0]) // 4,), torch.nan).numpy().tobytes()
    head = TensorSpec("lm_head", "float32", message.tensors[0].shape)
    bad: list[tuple[str, list[TensorSpec], list[Any]]] = [
        ("frames", message.tensors, frames[:-1]),
        ("frames", message.tensors, [*frames, b""]),
        ("frames", message.tensors, [frames[0][:-4], frames[1]]),
        ("tensors", message.tensors[:1], frames[:1]),
        ("tensors", [*message.tensors, head], [*frames, frames[0]]),
        ("tensors", [TensorSpec("embedding", "float32", (1, 2)), message.tensors[1]], frames),
        ("frames", [TensorSpec(s.name, "int64", s.shape) for s in message.tensors], frames),
        ("not_finite", message.tensors, [nan, frames[1]]),
    ]
    for reason, specs, parts in bad:
        followed.moving.receive(SERVER, TargetTensors(3, specs), parts)
        assert followed.inbox.rejected[-1] == reason
    assert followed.moves == []
    followed.moving.receive(SERVER, message, frames)
    assert [version for _, version in followed.moves] == [3]


def test_the_drafter_learns_on_from_new_traffic_only_against_the_new_target(tmp_path):
    new = moved_model(tmp_path, tied=True)
    old = LlamaForCausalLM.from_pretrained(tmp_path)
    base = Target.open(tmp_path)
    store = WeightStore(tmp_path / "drafts")
    facts = {"parent": None, "sha256": "", "target_id": "tiny", "target_version": 0}
    tensors, config = Eagle3.build(base, vocab_size=40).export()
    manifest = store.publish(
        tensors, config, DraftManifest(version=0, method="eagle3", origin="given", **facts)
    )
    settings = LearnSettings(checkpoint_interval_s=1e6)
    intake = Intake(settings, None, base)
    course = Course(settings, base, store, intake, watched=True)
    course.went_live(0, manifest.sha256)
    course.begin(0, None)
    assert course.session is not None
    assert course.live is not None

    def put(model: LlamaForCausalLM, seed: int, version: int) -> None:
        span = make_span(model, 30, 6, seed=seed)
        intake.put(*make_trace(span, target_version=version, prompt_hash=f"{seed:032x}"))

    put(old, 1, 0)
    assert intake.received == 1
    with pytest.raises(RecordError, match="target_version: 3, not 0"):
        put(new, 2, 3)
    weights = {n: p.clone() for n, p in course.session.drafter.named_parameters()}
    head = shared_with_drafters(tmp_path / "moved")
    target = base.moved(head["embedding"], head["final_norm"])
    course.retarget(target, 3)
    assert intake.replay.training_tokens + intake.replay.heldout_tokens == 0
    for drafter in (course.session.drafter, course.live.drafter):
        assert drafter.embedding is target.embedding
    for name, parameter in course.session.drafter.named_parameters():
        assert torch.equal(parameter, weights[name])
    with pytest.raises(RecordError, match="target_version: 0, not 3"):
        put(old, 3, 0)
    put(new, 5, 3)
    assert intake.received == 2
    assert intake.replay.training_tokens + intake.replay.heldout_tokens > 0
    # It learns as one does that began with the new target.
    span = make_span(new, 30, 6, seed=6)
    losses = [
        TrainingSession(load_version(store, 0, "eagle3", t), t, settings).update([span]).loss
        for t in (base, target)
    ]
    assert abs(losses[0] - losses[1]) > 1e-4
    assert course.session.update([span]).loss == pytest.approx(losses[1], abs=1e-6)
