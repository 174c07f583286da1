"""The course of learning: what goes live is watched, and gone back from when it is worse."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from learner.batch import Span, collate
from learner.course import COLD_TOKENS, START_TOKENS, Course
from learner.drafters.eagle3 import Eagle3
from learner.intake import Intake
from learner.objective import acceptance, expected_length
from learner.pace import SHORTEST_INTERVAL
from learner.speed import SPEED_WINDOW
from learner.target import Target
from rlcore.records.trace import VerifyStep
from rlcore.records.versions import DraftManifest
from rlcore.records.wire import RecordError
from rlcore.settings import DrafterSettings
from rlcore.weights import WeightStore
from tests.learner.tiny import HIDDEN, VOCAB, make_span, make_target, make_trace

K = 3
SETTINGS = DrafterSettings(gate_tokens=100, batch_tokens=64, heldout_share=0.3)

torch.set_num_threads(1)


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    folder = tmp_path_factory.mktemp("target")
    model = make_target(folder)
    target = Target.open(folder)
    return model, target, Eagle3.build(target, vocab_size=VOCAB)


def publish(store: WeightStore, head: Eagle3, version: int, parent: int | None, origin: str) -> str:
    tensors, config = head.export(torch.float32)
    manifest = DraftManifest(
        version=version, parent=parent, method="eagle3", sha256="", target_id="tiny",
        target_version=0, origin=origin,
    )  # fmt: skip
    return store.publish(tensors, config, manifest).sha256


def damaged(head: Eagle3) -> Eagle3:
    """Drafts one token only, which is never right."""
    worse = Eagle3(head.config, head.vocab, head.embedding)
    worse.load_state_dict(head.state_dict())
    with torch.no_grad():
        worse.lm_head.weight.zero_()
        worse.lm_head.weight[VOCAB - 2] = 1.0
    return worse


def begun(world, folder: Path) -> tuple[Course, dict[int, str]]:
    """Version 0 is live, and version 1, made from it, is damaged."""
    _, target, head = world
    store = WeightStore(folder)
    digests = {
        0: publish(store, head, 0, None, "untrained"),
        1: publish(store, damaged(head), 1, 0, "learned"),
    }
    intake = Intake(SETTINGS, None, target)
    course = Course(SETTINGS, target, store, intake, watched=True)
    assert course.went_live(0, digests[0])
    course.begin(0, None)
    return course, digests


def agreeable(world, seed: int, version: int) -> Span:
    """A request whose committed tokens version 0 would have drafted, served by ``version``."""
    model, _, head = world
    span = make_span(model, 60, 8, seed=seed)
    batch = collate([span], with_aux=True)
    drafts = head.propose(head.unroll(batch, 1)[0])
    tokens = span.token_ids.clone()
    # Only the first drafts are made right: later tokens change what would be drafted for them.
    first = span.first_anchor + 2
    tokens[first : first + len(drafts)] = drafts[: len(tokens) - first]
    span = replace(span, token_ids=tokens)
    matches, _ = acceptance(head, collate([span], with_aux=True), K)
    own = expected_length(matches).tolist()
    ids, at, steps = tokens.tolist(), span.prompt_length + 1, []
    while at + K + 1 < len(ids):
        length = own[at - span.prompt_length - 1] if version == 0 else 1
        right, wrong = ids[at : at + length - 1], [(ids[at + length - 1] + 1) % VOCAB] * K
        steps.append(
            VerifyStep(at, version, [*right, *wrong][:K], length - 1, ids[at + length - 1])
        )
        at += length
    return replace(span, steps=tuple(steps), request_id=f"r{version}-{seed}")


def test_a_worse_version_is_gone_back_from_and_learning_starts_over(world, tmp_path):
    course, digests = begun(world, tmp_path)
    assert course.session is not None
    with torch.no_grad():
        course.session.drafter.lm_head.weight.zero_()
    assert course.went_live(1, digests[1])
    for seed in range(60):
        course.saw(agreeable(world, seed, version=1), now=float(seed))
        if course.retreat() is not None:
            break
    retreat = course.retreat()
    assert retreat is not None
    assert (retreat.version, retreat.to) == (1, 0)
    assert "the version before" in retreat.reason
    assert not course.can_judge()
    assert course.went_live(0, digests[0])
    assert course.retreat() is None
    assert course.progress.rolled_back == 1
    assert course.session.drafter.lm_head.weight.abs().sum() > 0
    for seed in range(60, 90):
        course.saw(agreeable(world, seed, version=0), now=float(seed))
    assert course.retreat() is None


def test_a_version_that_an_operator_leaves_is_not_a_rollback(world, tmp_path):
    course, digests = begun(world, tmp_path)
    session = course.session
    course.went_live(1, digests[1])
    course.went_live(0, digests[0])
    assert course.session is session
    assert course.progress.rolled_back == 0


def test_recordings_say_nothing_about_the_live_version(world, tmp_path):
    _, target, _ = world
    course, digests = begun(world, tmp_path)
    store = course.publisher.store
    replayed = Course(SETTINGS, target, store, Intake(SETTINGS, None, target), watched=False)
    replayed.went_live(0, digests[0])
    replayed.begin(0, None)
    replayed.went_live(1, digests[1])
    for seed in range(40):
        replayed.saw(agreeable(world, seed, version=1), now=0.0)
    assert replayed.retreat() is None
    assert replayed.progress.drifts == 0


def test_a_version_that_cannot_be_read_leaves_the_live_one(world, tmp_path):
    course, digests = begun(world, tmp_path)
    (course.publisher.store.folder(1) / "model.safetensors").write_bytes(b"no")
    assert not course.went_live(1, digests[1])
    assert course.live is not None
    assert course.live.version == 0


def test_training_waits_for_traffic_and_keeps_to_the_ratio(world, tmp_path):
    model, *_ = world
    course, _ = begun(world, tmp_path)
    assert not course.train(2.0, now=0.0)
    assert course.progress.phase == "waiting for traces"
    seed = 0
    while course.intake.replay.training_tokens < START_TOKENS:
        course.intake.replay.add(replace(make_span(model, 60, 8, seed=seed), prompt_hash="f" * 32))
        seed += 1
    course.intake.training_tokens = course.intake.replay.training_tokens
    while course.train(0.2, now=0.0):
        pass
    assert course.progress.phase == "idle"
    assert 0.2 <= course.tokens_seen / course.intake.training_tokens < 0.3


def test_a_checkpoint_brings_back_the_course(world, tmp_path):
    course, digests = begun(world, tmp_path / "store")
    course.progress.judged, course.progress.rolled_back = 7, 2
    assert course.session is not None
    course.session.save(tmp_path / "checkpoint", course.facts())
    again = Course(SETTINGS, course._target, course.publisher.store, course.intake, watched=True)
    again.went_live(0, digests[0])
    facts = again.begin(0, tmp_path / "checkpoint")
    assert facts is not None
    assert again.progress == course.progress
    assert again.facts() == course.facts()


def test_a_server_that_cannot_go_back_is_learned_on_from(world, tmp_path):
    course, digests = begun(world, tmp_path)
    course.went_live(1, digests[1])
    for seed in range(60):
        course.saw(agreeable(world, seed, version=1), now=float(seed))
    session = course.session
    assert course.retreat() is not None
    course.retreat_refused()
    assert course.retreat() is None
    course.went_live(0, digests[0])
    assert course.session is session


def test_a_trained_drafters_vocabulary_is_trusted_and_an_untrained_ones_is_not(world, tmp_path):
    _, target, head = world
    store = WeightStore(tmp_path)
    digest = publish(store, head, 0, None, "given")
    course = Course(SETTINGS, target, store, Intake(SETTINGS, None, target), watched=True)
    course.went_live(0, digest)
    course.begin(0, None)
    assert course.session is not None
    assert (course.session.counts.counts[head.vocab] > 0).all()
    untrained, _ = begun(world, tmp_path / "untrained")
    assert untrained.session is not None
    assert not untrained.session.counts.counts.any()


def test_a_watch_goes_on_after_a_restart(world, tmp_path):
    course, digests = begun(world, tmp_path / "store")
    course.went_live(1, digests[1])
    course.saw(agreeable(world, 0, version=1), now=0.0)
    assert course.session is not None
    course.session.save(tmp_path / "checkpoint", course.facts())
    store, intake = course.publisher.store, course.intake
    again = Course(SETTINGS, world[1], store, intake, watched=True)
    again.went_live(1, digests[1])
    again.begin(1, tmp_path / "checkpoint")
    assert again.facts()["watch"] == course.facts()["watch"]
    assert again.facts()["watch"][2]["requests"]
    other = Course(SETTINGS, world[1], store, intake, watched=True)
    other.went_live(0, digests[0])
    other.begin(0, tmp_path / "checkpoint")
    assert other.facts()["watch"][1:] == [None, None]


def winning(world, folder: Path) -> tuple[Course, DraftManifest]:
    """The damaged version 1 is live, and a version of intact weights has just beaten it."""
    course, digests = begun(world, folder)
    course.went_live(1, digests[1])
    for seed in range(40):
        span = replace(agreeable(world, seed, version=1), prompt_hash=f"{seed:032x}")
        assert course.intake.replay.add(span)
        assert course.intake.replay.holds_out(span)
        course.intake.heldout_tokens += span.anchors
    manifest = course.consider(now=0.0)
    assert manifest is not None
    assert manifest.gain_lower > 0
    return course, manifest


def realised(course: Course) -> tuple[int, int, str]:
    pace = course.facts()["pace"]
    return course.progress.published, pace["published_at"], pace["reason"]


def test_a_version_counts_as_published_once_the_server_took_it(world, tmp_path):
    course, manifest = winning(world, tmp_path)
    assert realised(course) == (0, 0, "a version won")
    assert course.went_live(manifest.version, manifest.sha256)
    assert realised(course) == (1, course.intake.heldout_tokens, "promoted")
    assert course.went_live(manifest.version, manifest.sha256)
    assert course.progress.published == 1


@pytest.mark.parametrize("answered", [True, False])
def test_a_version_that_the_server_refused_is_no_gain_realised(world, tmp_path, answered):
    course, manifest = winning(world, tmp_path)
    if answered:
        course.refused(manifest.version)
    else:  # the operator made another version live meanwhile, and the answer is lost
        course.went_live(0, course.publisher.store.manifest(0).sha256)
    assert realised(course) == (0, 0, "a version won")
    assert course.went_live(manifest.version, manifest.sha256)
    assert realised(course) == (0, 0, "a version won")


def test_a_pause_in_the_traffic_is_seen_as_one(world, tmp_path):
    def cost_of_a_stall(pause: float) -> float:
        course, _ = begun(world, tmp_path / str(pause))
        for seed in range(5):
            course.saw(agreeable(world, seed, version=0), now=float(seed))
        course.swapped(10.0, now=4.0 + pause)
        return course.facts()["pace"]["cost"]

    assert cost_of_a_stall(0.0) > COLD_TOKENS
    assert cost_of_a_stall(SPEED_WINDOW + 1) == COLD_TOKENS


def test_traffic_that_comes_back_is_not_kept_waiting_by_an_interval_set_while_it_faded(
    world, tmp_path
):
    course, _ = winning(world, tmp_path)
    last = 100.0
    course.saw(agreeable(world, 50, version=1), now=last)
    course.consider(now=last + SPEED_WINDOW - 1)
    assert course.publish_interval_s(last + SPEED_WINDOW - 1) > 4 * SPEED_WINDOW
    assert course.publish_interval_s(last + SPEED_WINDOW + 1) == SHORTEST_INTERVAL
    assert course.session is not None
    course.session.trainer.updates += 1  # there is something new to judge
    back = last + 2 * SPEED_WINDOW
    assert not course.due(back)
    course.saw(agreeable(world, 51, version=1), now=back)
    assert not course.due(back + SPEED_WINDOW - 1)
    assert course.due(back + SPEED_WINDOW)


def test_one_bad_version_leads_to_one_retreat_and_never_to_an_older_version(world, tmp_path):
    _, target, head = world
    store = WeightStore(tmp_path)
    digests = {
        0: publish(store, head, 0, None, "untrained"),
        1: publish(store, head, 1, 0, "learned"),
        2: publish(store, damaged(head), 2, 1, "learned"),
    }
    course = Course(SETTINGS, target, store, Intake(SETTINGS, None, target), watched=True)
    course.went_live(1, digests[1])
    course.begin(1, None)
    course.went_live(2, digests[2])
    for seed in range(60):
        course.saw(agreeable(world, seed, version=2), now=float(seed))
    assert course.retreat() is not None
    course.serves(1)  # the answer, or a hello, before the weights are here
    assert course.retreat() is None
    assert not course.can_judge()
    for _ in range(2):
        course.went_live(1, digests[1])
        course.serves(1)
    for seed in range(60, 180):  # late traces of the bad version, and some on which 0 did better
        course.saw(agreeable(world, seed, version=1 + seed % 2), now=float(seed))
        assert course.retreat() is None
    assert course.progress.rolled_back == 1
    assert course.session is not None
    course.session.save(tmp_path / "checkpoint", course.facts())
    again = Course(SETTINGS, target, store, course.intake, watched=True)
    again.went_live(1, digests[1])
    again.begin(1, tmp_path / "checkpoint")
    for seed in range(60):
        again.saw(agreeable(world, seed, version=1), now=float(seed))
    assert again.retreat() is None


def reading(head: Eagle3, layers: list[int]) -> Eagle3:
    """The head with another number of auxiliary layers, untrained."""
    config = head.config | {"eagle_config": {"eagle_aux_hidden_state_layer_ids": layers}}
    torch.manual_seed(0)
    return Eagle3(config, head.vocab, head.embedding)


def widened(span: Span, count: int) -> Span:
    """With ``count`` auxiliary states instead of three."""
    assert span.aux is not None
    aux = torch.cat([span.aux, span.aux], dim=1)[:, : count * HIDDEN].contiguous()
    return replace(span, aux=aux, prompt_hash="f" * 32)


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5])
def test_a_head_of_any_number_of_auxiliary_layers_is_learned_from_its_own_traces(
    world, tmp_path, count
):
    model, target, head = world
    store, settings = WeightStore(tmp_path), SETTINGS
    digest = publish(store, reading(head, list(range(1, count + 1))), 0, None, "given")
    course = Course(settings, target, store, Intake(settings, None, target), watched=True)
    assert course.went_live(0, digest)
    course.begin(0, None)
    for seed in range(40):
        trace = make_trace(widened(make_span(model, 60, 8, seed=seed), count))
        course.saw(course.intake.put(*trace), now=0.0)
    for other in {1, 2, 3, 4, 5} - {count}:
        with pytest.raises(RecordError, match="auxiliary width"):
            course.intake.put(*make_trace(widened(make_span(model, 60, 8, seed=99), other)))
    assert course.train(8.0, now=0.0)
    assert course.session is not None
    assert course.session.trainer.updates == 1


def test_a_draft_that_reads_other_layers_does_not_take_over_a_course(world, tmp_path, capsys):
    _, _, head = world
    course, _ = begun(world, tmp_path)
    digest = publish(course.publisher.store, reading(head, [1, 2, 3, 4]), 2, None, "given")
    assert not course.went_live(2, digest)
    assert course.live is not None
    assert course.live.version == 0
    assert course.intake.aux_count == 3
