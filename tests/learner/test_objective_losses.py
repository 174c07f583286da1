import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from learner.objectives.chances import Unrolled, chances, drafted_length, overlap, worth
from learner.objectives.losses import (
    AcceptReject,
    ExpectedLength,
    ForwardKL,
    Hybrid,
    Mixture,
    PushDown,
    TotalVariation,
    WorthKL,
    sharpened,
)
from learner.objectives.outcomes import ACCEPTED, REJECTED, UNKNOWN, Outcomes, nothing_served

torch.set_num_threads(1)

seeds = st.integers(0, 2**31)


def make_unrolled(seed: int = 0, anchors: int = 5, steps: int = 3, vocab: int = 7) -> Unrolled:
    """Random logits; the target keeps a tenth of its mass outside the draft vocabulary; the last
    anchor knows its first step only."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(steps, anchors, vocab, generator=generator, dtype=torch.float64)
    p = torch.softmax(2 * torch.randn(anchors + steps, vocab, generator=generator), -1) * 0.9
    judged = torch.ones(anchors, steps, dtype=torch.bool)
    judged[-1, 1:] = False
    return Unrolled(
        logits=[step.float().requires_grad_() for step in logits],
        p=p,
        row=torch.arange(anchors).unsqueeze(1) + torch.arange(steps),
        judged=judged,
        weight=judged.float(),
        committed=torch.randint(-1, vocab, (anchors, steps), generator=generator),
        rejected=torch.full((anchors,), -1),
        outcomes=nothing_served(anchors),
    )


def value(loss: torch.Tensor) -> float:
    return float(loss.detach())


def gradient(loss, batch: Unrolled) -> list[torch.Tensor]:
    grads = torch.autograd.grad(loss, batch.logits, allow_unused=True)
    return [
        torch.zeros_like(x) if g is None else g for g, x in zip(grads, batch.logits, strict=True)
    ]


@settings(max_examples=30, deadline=None)
@given(seeds)
def test_expected_length_is_the_mean_of_its_definition(seed):
    generator = torch.Generator().manual_seed(seed)
    chance = torch.rand(1, 3, generator=generator)
    a, b, c = chance[0].tolist()
    expected = a * (1 - b) + 2 * a * b * (1 - c) + 3 * a * b * c
    assert float(drafted_length(chance)) == pytest.approx(expected, rel=1e-5)


@settings(max_examples=30, deadline=None)
@given(seeds, st.integers(1, 5))
def test_the_worth_of_a_draft_is_the_gradient_of_the_expected_length(seed, steps):
    chance = torch.rand(4, steps, generator=torch.Generator().manual_seed(seed)).requires_grad_()
    (slope,) = torch.autograd.grad(drafted_length(chance).sum(), chance)
    torch.testing.assert_close(worth(chance.detach()), slope)


@settings(max_examples=30, deadline=None)
@given(seeds)
def test_overlap_is_one_less_the_total_variation_inside_the_vocabulary(seed):
    batch = make_unrolled(seed)
    q, p = torch.softmax(batch.logits[1], -1), batch.target(1)
    # The target's tenth outside D is variation that no drafter can take away.
    variation = 0.5 * ((p - q).abs().sum(-1) + 0.1)
    torch.testing.assert_close(overlap(batch, 1), 1 - variation)


@settings(max_examples=20, deadline=None)
@given(seeds, st.sampled_from(["overlap", "matching", "agreement", "committed"]))
def test_length_grows_along_its_own_gradient_and_never_past_what_is_known(seed, form):
    batch = make_unrolled(seed)
    loss, weight = ExpectedLength(form)(batch)
    found = chances(batch, form)
    assert ((found >= 0) & (found <= 1 + 1e-6)).all()
    assert (found[-1, 1:] == 0).all()
    assert value(loss) == pytest.approx(weight * 3 - value(drafted_length(found).sum()), rel=1e-4)
    better = [
        x.detach() - 0.05 * g for x, g in zip(batch.logits, gradient(loss, batch), strict=True)
    ]
    after, _ = ExpectedLength(form)(dataclasses.replace(batch, logits=better))
    assert value(after) <= value(loss) + 1e-6


def test_matching_is_the_expectation_of_committed_over_the_targets_draw():
    batch = make_unrolled()
    mean = torch.zeros(5)
    for token in range(7):
        chosen = dataclasses.replace(batch, committed=torch.full_like(batch.committed, token))
        mean += batch.target(0)[:, token] * chances(chosen, "committed")[:, 0].detach()
    torch.testing.assert_close(chances(batch, "matching")[:, 0].detach(), mean)


def test_forward_kl_is_least_where_the_drafter_equals_the_target():
    batch = make_unrolled()
    exact = [batch.target(j).log().requires_grad_() for j in range(3)]
    loss, _ = ForwardKL()(dataclasses.replace(batch, logits=exact))
    for grad in gradient(loss, dataclasses.replace(batch, logits=exact)):
        assert float(grad.abs().max()) < 1e-6
    assert value(loss) < value(ForwardKL()(batch)[0])


def test_sharpening_keeps_mass_and_order_and_raises_the_likeliest():
    p = make_unrolled().p
    sharp = sharpened(p, 2.0)
    torch.testing.assert_close(sharp.sum(-1), p.sum(-1))
    assert torch.equal(sharp.argsort(-1), p.argsort(-1))
    assert (sharp.amax(-1) > p.amax(-1)).all()


def test_worth_weights_leave_a_step_alone_that_is_never_reached():
    batch = make_unrolled()
    # The first draft is surely wrong: all on a token that the target never emits.
    impossible = torch.full((5, 7), -50.0)
    impossible[:, 0] = 50.0
    p = batch.p.clone()
    p[:, 0] = 0.0
    batch = dataclasses.replace(batch, p=p, logits=[impossible.requires_grad_(), *batch.logits[1:]])
    loss, _ = WorthKL()(batch)
    first, second, third = gradient(loss, batch)
    assert float(first.abs().sum()) > 0
    assert float(second.abs().sum()) == pytest.approx(0, abs=1e-6)
    assert float(third.abs().sum()) == pytest.approx(0, abs=1e-6)


def test_trusted_outcomes_decide_what_a_draft_is_worth():
    # Anchor 0: its first draft was rejected; anchor 1: both positions were accepted.
    verdict = torch.tensor([REJECTED, ACCEPTED, ACCEPTED, UNKNOWN])
    batch = dataclasses.replace(
        make_unrolled(anchors=4, steps=2),
        outcomes=dataclasses.replace(nothing_served(4), verdict=verdict),
    )
    full = WorthKL(trust=1.0)
    grads = gradient(full(batch)[0], batch)
    plain = gradient(ForwardKL(decay=1.0)(batch)[0], batch)
    assert float(grads[1][0].abs().sum()) == 0
    torch.testing.assert_close(grads[0][0], plain[0][0] * 2)  # the second draft would be accepted
    torch.testing.assert_close(grads[0][1], plain[0][1] * 2)
    torch.testing.assert_close(grads[1][1], plain[1][1])
    own = gradient(WorthKL(trust=0.0)(batch)[0], batch)
    none = dataclasses.replace(batch, outcomes=nothing_served(4))
    torch.testing.assert_close(gradient(full(none)[0], none), own)


def test_the_logarithm_divides_the_gradient_by_the_acceptance():
    batch = make_unrolled(anchors=1, steps=1)
    plain = gradient(TotalVariation()(batch)[0], batch)[0]
    log = gradient(TotalVariation(log=True)(batch)[0], batch)[0]
    torch.testing.assert_close(log * float(overlap(batch, 0).detach()), plain)


@settings(max_examples=20, deadline=None)
@given(seeds, st.floats(0, 1))
def test_a_mixture_is_the_weighted_mean_of_the_two_losses(seed, share):
    batch = make_unrolled(seed)
    one, two = ForwardKL(), ExpectedLength()
    (a, wa), (b, wb), (m, wm) = one(batch), two(batch), Mixture(one, two, share)(batch)
    mean = (1 - share) * value(a / wa) + share * value(b / wb)
    assert value(m / wm) == pytest.approx(mean, rel=1e-4)


def test_the_hybrid_is_all_kl_where_nothing_is_accepted_and_moves_on_from_there():
    batch = make_unrolled()
    kl, length = ForwardKL(), ExpectedLength()
    nothing = dataclasses.replace(batch, p=torch.zeros_like(batch.p))
    assert value(Hybrid(kl, length)(nothing)[0]) == pytest.approx(value(kl(nothing)[0]))
    slow, fast = Hybrid(kl, length, eta=0.1), Hybrid(kl, length, eta=10.0)
    (a, wa), (b, wb) = kl(batch), length(batch)
    distance = [abs(value(h(batch)[0] / wa - b / wb)) for h in (slow, fast)]
    assert distance[1] < distance[0] < abs(value(a / wa - b / wb))


def served(drafted: list[int], accepted: list[int], passed: list[bool]) -> Outcomes:
    tensors = (torch.tensor(drafted), torch.tensor(accepted))
    none = torch.full((len(drafted),), -1)
    return Outcomes(*tensors, none, torch.tensor(passed), torch.zeros(len(drafted)).long(), none)


def test_policy_gradient_lifts_accepted_drafts_and_sinks_rejected_ones_on_the_path_only():
    # Anchor 0 had its first draft accepted and its second (token 5) rejected; anchor 1 all rejected.
    batch = dataclasses.replace(
        make_unrolled(anchors=2, steps=3),
        judged=torch.ones(2, 3, dtype=torch.bool),
        committed=torch.tensor([[1, 2, 3], [2, 3, 4]]),
        rejected=torch.tensor([5, 6]),
        outcomes=served([3, 3], [1, 0], [False, False]),
    )
    loss, weight = AcceptReject(replacement=False)(batch)
    first, second, third = gradient(loss, batch)
    assert weight == 3
    assert first[0, 1] < 0 < first[1, 6]  # a gradient step goes against the sign
    assert float(third.abs().sum()) == 0
    # Nobody's second draft was accepted: the baseline is 0 and only the replacement teaches.
    assert float(second.abs().sum()) == 0
    taught = gradient(AcceptReject()(batch)[0], batch)
    assert taught[1][0, 2] < 0
    assert taught[0][1, 2] < 0
    assert float(taught[2].abs().sum()) == 0


def test_passed_anchors_and_unserved_drafts_are_no_signal_to_the_policy_gradient():
    batch = dataclasses.replace(
        make_unrolled(anchors=2, steps=3),
        committed=torch.tensor([[1, 2, 3], [2, 3, 4]]),
        outcomes=served([0, 0], [0, 0], [True, True]),
    )
    for loss in (AcceptReject(), AcceptReject(replacement=False)):
        assert loss(batch)[1] == 0


def test_pushing_down_touches_the_rejected_draft_of_its_step_alone():
    batch = dataclasses.replace(
        make_unrolled(anchors=2, steps=3),
        rejected=torch.tensor([4, -1]),
        outcomes=served([3, 3], [1, 3], [False, False]),
    )
    base = gradient(ForwardKL()(batch)[0], batch)
    pushed = gradient(PushDown(ForwardKL(), strength=1.0)(batch)[0], batch)
    change = [b - a for a, b in zip(base, pushed, strict=True)]
    assert change[1][0, 4] > 0
    assert float(change[0].abs().sum()) == 0
    assert float(change[1][1].abs().sum()) == 0
    assert float(change[2].abs().sum()) == 0
