import json
import resource
import sys
from dataclasses import replace

import pytest
import torch

from learner.drafters.draft_model import DraftModel
from learner.drafters.eagle3 import Eagle3
from learner.judging import score_spans
from learner.session import CHECKPOINT_SCHEMA, TrainingSession, keep_freed_memory
from learner.target import Target
from rlcore.checkpoint import FACTS, CheckpointError
from rlcore.records.trace import VerifyStep
from rlcore.settings import LearnSettings
from tests.learner.tiny import VOCAB, make_span, make_target

torch.set_num_threads(1)


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    folder = tmp_path_factory.mktemp("target")
    model = make_target(folder)
    return model, Target.open(folder)


def make(target):
    return TrainingSession(Eagle3.build(target, vocab_size=40), target, LearnSettings())


def weights(drafter):
    return {name: p.detach().clone() for name, p in drafter.named_parameters()}


def test_the_candidate_is_the_average_and_training_goes_on_from_the_weights(world):
    model, target = world
    session = make(target)
    for seed in range(3):
        session.update([make_span(model, 20, 4, seed=seed)])
    before = weights(session.drafter)
    with session.candidate() as drafter:
        assert not drafter.training
        shown = weights(drafter)
    assert all(torch.equal(shown[name], t) for name, t in session.trainer.average.items())
    assert not torch.equal(shown["fc.weight"], before["fc.weight"])
    after = weights(session.drafter)
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_a_vocabulary_that_moves_takes_the_average_along(world):
    model, target = world
    session = make(target)
    for seed in range(3):
        session.update([make_span(model, 20, 4, seed=seed)])
    old_vocab = session.drafter.vocab
    average = session.trainer.average["lm_head.weight"].clone()
    fresh_ids = torch.tensor(sorted(set(range(VOCAB)) - set(old_vocab.tolist()))[:3])
    session.counts.counts[fresh_ids] = 1e6
    assert session.follow_traffic() == 3
    with session.candidate() as drafter:
        for token, row in zip(drafter.vocab.tolist(), drafter.lm_head.weight, strict=True):
            place = (old_vocab == token).nonzero().flatten()
            expected = average[place[0]] if len(place) else target.lm_head[token]
            assert torch.equal(row, expected)
    assert session.update([make_span(model, 20, 4, seed=9)]).skipped is None


def test_a_restored_session_shows_the_same_candidate(world, tmp_path):
    model, target = world
    session = make(target)
    for seed in range(3):
        session.update([make_span(model, 20, 4, seed=seed)])
    session.save(tmp_path / "checkpoint", {"kept": 1})
    restored = make(target)
    facts = restored.load(tmp_path / "checkpoint")
    assert facts is not None
    assert facts["kept"] == 1
    assert restored.tokens_seen == session.tokens_seen > 0
    with session.candidate() as one, restored.candidate() as two:
        assert all(
            torch.equal(a, b) for a, b in zip(one.parameters(), two.parameters(), strict=True)
        )


def test_a_session_that_starts_over_counts_on_but_keeps_its_own_weights(world):
    model, target = world
    old, new = make(target), make(target)
    old.counts.add(make_span(model, 20, 4))
    old.update([make_span(model, 20, 4)])
    before = weights(new.drafter)
    new.take_counters(old)
    assert new.tokens_seen == old.tokens_seen > 0
    assert torch.equal(new.counts.counts, old.counts.counts)
    assert all(torch.equal(t, before[name]) for name, t in weights(new.drafter).items())


@pytest.mark.skipif(sys.platform != "linux", reason="a setting of glibc")
def test_a_checkpoint_of_another_schema_is_refused_in_words(world, tmp_path):
    session = make(world[1])
    session.save(tmp_path / "checkpoint", {})
    facts = tmp_path / "checkpoint" / FACTS
    facts.write_text(json.dumps(json.loads(facts.read_text()) | {"schema": CHECKPOINT_SCHEMA - 1}))
    with pytest.raises(CheckpointError, match="another version"):
        session.load(tmp_path / "checkpoint")


def test_freed_tensors_are_used_again_without_new_pages():
    keep_freed_memory()

    def faults():
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        for _ in range(3):
            tensors = [torch.ones(2_000_000) for _ in range(10)]
            del tensors
        return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

    faults()
    # Given back and mapped again, each of the 30 has 1953 pages.
    assert faults() < 1953


def greedy_span(model, seed, length=40):
    """A request that the target answered greedily, with all states."""
    span = make_span(model, length, 4, seed=seed)
    tokens = span.token_ids[None, :4]
    with torch.no_grad():
        for _ in range(length - 3):
            tokens = torch.cat([tokens, model(tokens).logits[:, -1:].argmax(-1)], dim=1)
        last = model.model(tokens[:, :length]).last_hidden_state[0]
        lse = torch.logsumexp(model.lm_head(last), dim=-1)
    return replace(span, token_ids=tokens[0], last=last, lse=lse, aux=None)


def test_a_draft_model_learns_with_the_default_objective(world):
    model, target = world
    settings = LearnSettings(method="draft_model")
    session = TrainingSession(DraftModel.build(target, VOCAB, layers=2), target, settings)
    spans = [greedy_span(model, seed) for seed in range(4)]

    def length():
        with session.candidate() as drafter:
            scores = score_spans(drafter, spans, settings.speculative_tokens)
        return sum(s.length_sum for s in scores) / sum(s.anchors for s in scores)

    before = length()
    metrics = [session.update(spans) for _ in range(40)]
    assert all(m.skipped is None for m in metrics)
    assert metrics[-1].loss < metrics[0].loss
    assert length() > before


@pytest.mark.parametrize("rejected_at", [0, 1, 2])
def test_a_draft_model_is_pushed_off_a_rejected_draft_wherever_in_the_step_it_stood(
    world, rejected_at
):
    model, target = world
    span = greedy_span(model, seed=1)
    ids = span.token_ids.tolist()
    at = 12
    wrong = next(t for t in range(VOCAB) if t != ids[at + rejected_at])
    drafts = [*ids[at : at + rejected_at], wrong, 0, 0][:3]
    step = VerifyStep(at, 0, drafts, rejected_at, ids[at + rejected_at])

    def chance_after(steps):
        session = TrainingSession(
            DraftModel.build(target, VOCAB, layers=2), target, LearnSettings(method="draft_model")
        )
        for _ in range(3):
            session.update([replace(span, steps=steps)])
        tokens = span.token_ids[None, : at + rejected_at]
        return session.drafter.model(tokens).logits[0, -1].softmax(-1)[wrong].item()

    assert chance_after((step,)) < chance_after(())
