"""Remembered scores are those of the very weights that are live."""

import dataclasses

import pytest
import torch

from learner.drafters.eagle3 import Eagle3
from learner.judging import LiveScores, gate_scores, score_spans
from learner.live import LiveDraft
from learner.target import Target
from tests.learner.tiny import VOCAB, make_span, make_target

torch.set_num_threads(1)


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    folder = tmp_path_factory.mktemp("target")
    model = make_target(folder)
    target = Target.open(folder)
    heads = [Eagle3.build(target, vocab_size=VOCAB, seed=seed) for seed in (1, 2)]
    with torch.no_grad():
        heads[1].lm_head.weight.mul_(-1.0)
    return [make_span(model, 40, 4, seed=seed) for seed in range(4)], heads


@pytest.mark.parametrize("named", [[(3, "a"), (3, "b")], [(3, "a"), (4, "a")]])
def test_other_weights_are_scored_again_whatever_their_number(world, named):
    spans, heads = world
    scores = LiveScores()
    for _ in range(2):
        for (version, digest), head in zip(named, heads, strict=True):
            found = scores.of(LiveDraft(version, digest, head), spans, 3)
            assert found == score_spans(head, spans, 3)
    assert score_spans(heads[0], spans, 3) != score_spans(heads[1], spans, 3)


def test_the_same_weights_are_scored_once(world):
    spans, heads = world
    scores = LiveScores()
    first = scores.of(LiveDraft(3, "a", heads[0]), spans[:3], 3)
    again = scores.of(LiveDraft(3, "a", heads[1]), spans, 3)
    assert again[:3] == first
    assert again[3:] == score_spans(heads[1], spans[3:], 3)


def test_traffic_with_an_adapter_is_a_slice_of_its_own(world):
    spans, heads = world
    adapted = [dataclasses.replace(span, adapter="french") for span in spans[:2]]
    both = [*adapted, *spans[2:]]
    scores = gate_scores(score_spans(heads[0], both, 3), both, ["recent"] * 4)
    tenant = spans[0].tenant
    assert [score.tenant for score in scores] == [f"{tenant}/french"] * 2 + [tenant] * 2
