import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from learner.batch import collate
from learner.drafters.draft_model import DraftModel
from learner.estimate import chain_lengths, replay_drafts
from learner.target import Target
from tests.learner.tiny import VOCAB, make_span, make_steps, make_target

torch.set_num_threads(1)


@pytest.fixture(scope="module", params=[True, False], ids=["tied", "untied"])
def world(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("target")
    model = make_target(folder, tied=request.param)
    return model, Target.open(folder)


def test_all_layers_of_the_target_make_the_target(world):
    model, target = world
    drafter = DraftModel.build(target, layers=8, vocab_size=VOCAB)
    span = make_span(model, 10, 3, first_position=0)
    batch = collate([span], with_aux=False)
    for j, hidden in enumerate(drafter.unroll(batch, 3)):
        judged = batch.judged(j)
        rows = batch.anchor_row[judged] + 1 + j
        torch.testing.assert_close(hidden[judged], span.last[rows], rtol=1e-4, atol=1e-4)


def test_every_draft_equals_generating_from_the_committed_tokens(world):
    model, target = world
    drafter = DraftModel.build(target, layers=2, vocab_size=VOCAB)
    span = make_span(model, 11, 4)
    span = type(span)(**{**vars(span), "steps": make_steps(span, 3)})
    for step, draft in zip(span.steps, replay_drafts(drafter, span), strict=True):
        context = span.token_ids[None, : step.position]
        for token in draft:
            assert int(drafter.model(context).logits[0, -1].argmax()) == token
            context = torch.cat([context, torch.tensor([[token]])], dim=1)


def test_positions_stay_absolute_behind_a_cached_prefix(world):
    model, target = world
    drafter = DraftModel.build(target, layers=2, vocab_size=VOCAB)
    span = make_span(model, 8, 10, first_position=9)
    batch = collate([span], with_aux=False)
    positions = 9 + torch.arange(9)[None]
    expected = drafter.model.base_model(span.token_ids[None], position_ids=positions)
    got = drafter.unroll(batch, 1)[0]
    torch.testing.assert_close(got, expected.last_hidden_state[0, batch.anchor_row + 1])


def test_embedding_and_head_are_frozen_and_exported_as_a_whole_folder(world, tmp_path):
    model, target = world
    drafter = DraftModel.build(target, layers=2, vocab_size=40)
    trained = {name for name, p in drafter.named_parameters() if p.requires_grad}
    assert trained
    assert not any("embed" in name or "lm_head" in name for name in trained)
    drafter.save(tmp_path)
    assert ("lm_head.weight" in load_file(tmp_path / "model.safetensors")) == (
        not model.config.tie_word_embeddings
    )
    tokens = torch.arange(6)[None]
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path)(tokens).logits
    torch.testing.assert_close(theirs, drafter.model(tokens).logits)
    again = DraftModel.load(tmp_path, target)
    assert torch.equal(again.model(tokens).logits, drafter.model(tokens).logits)


def test_drafting_the_targets_own_greedy_text_is_always_accepted(world):
    model, target = world
    drafter = DraftModel.build(target, layers=8, vocab_size=VOCAB)
    tokens = torch.tensor([[3, 1, 4]])
    for _ in range(12):
        tokens = torch.cat([tokens, model(tokens).logits[:, -1:].argmax(-1)], dim=1)
    span = make_span(model, 14, 3)
    span = type(span)(**{**vars(span), "token_ids": tokens[0]})
    (lengths,) = chain_lengths(drafter, [span], 3)
    assert lengths.length_sum == 4 * lengths.anchors > 0
    assert lengths.emitted == 4 * lengths.steps
