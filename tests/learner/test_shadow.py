"""A replayed predecessor is compared with the live version on the same tokens, or not at all."""

from dataclasses import replace

import pytest
import torch

from learner.batch import collate
from learner.drafters.eagle3 import Eagle3
from learner.objective import acceptance, expected_length
from learner.shadow import drafted, shadow
from learner.target import Target
from rlcore.records.trace import VerifyStep
from tests.learner.tiny import make_span, make_target

K = 3
LIVE = 7

torch.set_num_threads(1)


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    folder = tmp_path_factory.mktemp("target")
    model = make_target(folder)
    target = Target.open(folder)
    return make_span(model, 40, 6), Eagle3.build(target, vocab_size=60)


def served(span, lengths, version=LIVE, k=K):
    """The span as if a drafter had been accepted with these lengths, one step after the other."""
    ids = span.token_ids.tolist()
    at, steps = span.prompt_length + 1, []
    for length in lengths:
        drafts = [ids[at + i] for i in range(length - 1)]
        drafts += [(ids[at + i] + 1) % 96 for i in range(length - 1, k)]
        replacement = ids[at + length - 1]
        steps.append(VerifyStep(at, version, drafts[:k], length - 1, replacement))
        at += length
    return replace(span, steps=tuple(steps))


def test_a_drafter_that_is_never_right_needs_a_step_for_each_token(world):
    span, drafter = world
    with torch.no_grad():
        nothing = Eagle3(drafter.config, drafter.vocab, drafter.embedding)
        nothing.load_state_dict(drafter.state_dict())
        nothing.lm_head.weight.zero_()
        nothing.lm_head.weight[0] = 1.0
    span = replace(
        span, token_ids=torch.where(span.token_ids == nothing.vocab[0], 9, span.token_ids)
    )
    pair = shadow(nothing, nothing, served(span, [2, 3, 1, 4]), LIVE, K)
    assert (pair.tokens, pair.live, pair.other) == (10, 4, 10)


def test_the_live_drafter_itself_needs_as_many_steps(world):
    """Served as the drafter's own chain would have been, both counts are the same."""
    span, drafter = world
    matches, _ = acceptance(drafter, collate([span], with_aux=True), K)
    every = expected_length(matches).tolist()
    lengths: list[int] = []
    while sum(lengths) < 20:
        lengths.append(every[sum(lengths)])
    pair = shadow(drafter, drafter, served(span, lengths), LIVE, K)
    assert pair.tokens == sum(lengths)
    assert pair.other == pytest.approx(pair.live)


def test_what_another_version_served_ends_the_comparison(world):
    span, drafter = world
    whole = served(span, [1, 2, 1, 3])
    cut = [*whole.steps[:2], replace_step(whole.steps[2], version=3), whole.steps[3]]
    pair = shadow(drafter, drafter, replace(whole, steps=tuple(cut)), LIVE, K)
    assert (pair.tokens, pair.live) == (3, 2)


@pytest.mark.parametrize("k", [0, 1, 2])
def test_fewer_drafts_than_k_are_compared_as_if_k_had_been_drafted(world, k):
    """Served with k drafts a step or none; both drafters are the same, so both need the same."""
    span, drafter = world
    matches, _ = acceptance(drafter, collate([span], with_aux=True), K)
    every = expected_length(matches).tolist()
    lengths: list[int] = []
    while sum(lengths) < 20:
        lengths.append(min(every[sum(lengths)], k + 1))
    pair = shadow(drafter, drafter, served(span, lengths, k=k), LIVE, K)
    assert pair.tokens == sum(lengths)
    assert pair.live == pytest.approx(pair.other)


def test_a_version_that_drafts_nothing_because_it_is_worthless_is_seen_to_be(world):
    span, drafter = world
    nothing = Eagle3(drafter.config, drafter.vocab, drafter.embedding)
    nothing.load_state_dict(drafter.state_dict())
    with torch.no_grad():
        nothing.lm_head.weight.zero_()
        nothing.lm_head.weight[0] = 1.0
    span = replace(
        span, token_ids=torch.where(span.token_ids == nothing.vocab[0], 9, span.token_ids)
    )
    plain = served(span, [1] * 12, k=0)
    pair = shadow(nothing, drafter, plain, LIVE, K)
    assert (pair.tokens, pair.live) == (12, 12)
    assert pair.other <= pair.live


def test_a_rejection_among_few_drafts_is_known_for_k(world):
    """The first of two drafts was rejected: the step emits one token whatever K is."""
    span, drafter = world
    whole = served(span, [1, 1, 1], k=2)
    pair = shadow(drafter, drafter, whole, LIVE, K)
    assert (pair.tokens, pair.live) == (3, 3)


def test_a_first_token_without_an_anchor_is_passed_over(world):
    span, drafter = world
    whole = served(span, [1, 2, 1])
    first = VerifyStep(span.prompt_length, LIVE, [], 0, int(span.token_ids[span.prompt_length]))
    pair = shadow(drafter, drafter, replace(whole, steps=(first, *whole.steps)), LIVE, K)
    assert (pair.tokens, pair.live) == (4, 3)


def test_nothing_is_compared_without_the_context_or_the_version(world):
    span, drafter = world
    whole = served(span, [1, 2])
    assert shadow(drafter, drafter, whole, LIVE + 1, K) is None
    assert shadow(drafter, drafter, replace(whole, steps=()), LIVE, K) is None
    assert shadow(drafter, drafter, moved(whole, 1), LIVE, K) is not None
    assert shadow(drafter, drafter, moved(whole, 4), LIVE, K) is None


def test_a_step_that_no_anchor_stands_for_ends_the_comparison(world):
    span, drafter = world
    first = VerifyStep(span.prompt_length, LIVE, [1, 2, 3], 0, int(span.token_ids[6]))
    assert shadow(drafter, drafter, replace(span, steps=(first,)), LIVE, K) is None


def test_live_acceptance_counts_its_own_drafting_steps_only(world):
    span, _ = world
    whole = served(span, [1, 2, 4])
    other = replace_step(whole.steps[1], version=3)
    assert drafted(whole, LIVE) == (5, 3)
    assert drafted(replace(whole, steps=(whole.steps[0], other, whole.steps[2])), LIVE) == (3, 2)
    plain = VerifyStep(whole.steps[0].position, LIVE, [], 0, whole.steps[0].replacement)
    assert drafted(replace(whole, steps=(plain,)), LIVE) == (0, 0)


def moved(span, by):
    """As if ``by`` tokens of a longer prompt had been in the prefix cache."""
    steps = [
        VerifyStep(s.position + by, s.draft_version, s.draft_ids, s.accepted, s.replacement)
        for s in span.steps
    ]
    return replace(
        span, first_position=by, prompt_length=span.prompt_length + by, steps=tuple(steps)
    )


def replace_step(step, version=None, drafts=None):
    ids = step.draft_ids if drafts is None else step.draft_ids[:drafts]
    accepted = min(step.accepted, len(ids))
    return VerifyStep(
        step.position, step.draft_version if version is None else version, ids, accepted,
        step.replacement,
    )  # fmt: skip
