"""The draft vocabulary follows the traffic, and what stays keeps its weights."""

from __future__ import annotations

import pytest
import torch

from learner.drafters.eagle3 import Eagle3
from learner.target import Target
from learner.vocabulary import STAY_FACTOR, TRUSTED_COUNT, TrafficCounts, follow_traffic
from rlcore.optim import MuonAdamW
from tests.learner.tiny import VOCAB, make_span, make_target


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    folder = tmp_path_factory.mktemp("target")
    return make_target(folder), Target.open(folder)


def trained_head(target):
    """A head whose rows differ from the target's, with an optimizer that has state for them."""
    head = Eagle3.build(target, vocab_size=32)
    optimizer = MuonAdamW(head.named_parameters())
    for parameter in head.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    return head, optimizer


def test_a_frequent_token_comes_in_with_the_targets_row_and_the_others_keep_theirs(world):
    _, target = world
    head, optimizer = trained_head(target)
    newcomer = next(t for t in range(VOCAB) if t not in head.vocab.tolist())
    before = {int(t): row.clone() for t, row in zip(head.vocab, head.lm_head.weight, strict=True)}
    counts = torch.zeros(VOCAB, dtype=torch.float64)
    counts[newcomer] = 100
    assert follow_traffic(head, target, counts, optimizer) == 1
    assert head.vocab.tolist() == sorted(head.vocab.tolist())
    moments = optimizer.state_tensors()["lm_head.weight.exp_avg"]
    for place, token in enumerate(head.vocab.tolist()):
        if token == newcomer:
            assert torch.equal(head.lm_head.weight[place], target.lm_head[token])
            assert not moments[place].any()
        else:
            assert torch.equal(head.lm_head.weight[place], before[token])
            assert moments[place].any()


def test_a_token_barely_ahead_does_not_replace_one_that_is_trained(world):
    _, target = world
    head, optimizer = trained_head(target)
    newcomer = next(t for t in range(VOCAB) if t not in head.vocab.tolist())
    counts = torch.full((VOCAB,), 10.0, dtype=torch.float64)
    counts[newcomer] = 10.0 * (STAY_FACTOR - 0.1)
    vocab = head.vocab.clone()
    assert follow_traffic(head, target, counts, optimizer) == 0
    assert torch.equal(head.vocab, vocab)


def test_generated_tokens_count_more_than_the_prompts(world):
    model, _ = world
    span = make_span(model, length=12, prompt_length=6)
    traffic = TrafficCounts(VOCAB)
    traffic.add(span)
    generated = torch.bincount(span.token_ids[span.first_anchor + 1 :], minlength=VOCAB)
    assert torch.all(traffic.counts >= generated)
    assert traffic.counts.sum() < len(span.token_ids)


def test_a_trained_vocabulary_outlasts_a_few_strangers(world):
    _, target = world
    head, _ = trained_head(target)
    strangers = [t for t in range(VOCAB) if t not in head.vocab.tolist()]
    traffic = TrafficCounts(VOCAB)
    traffic.counts[strangers] = 3.0
    fresh = Eagle3.build(target, vocab_size=32)
    assert follow_traffic(fresh, target, traffic.counts, None) > 0
    traffic.trust(head.vocab)
    assert follow_traffic(head, target, traffic.counts, None) == 0
    traffic.counts[strangers[0]] = 3 * STAY_FACTOR * TRUSTED_COUNT
    assert follow_traffic(head, target, traffic.counts, None) == 1
