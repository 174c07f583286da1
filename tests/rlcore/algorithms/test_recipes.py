from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlcore.algorithms.advantages import ADVANTAGES
from rlcore.algorithms.corrections import CORRECTIONS
from rlcore.algorithms.recipes import RECIPES, RecipeError, policy_loss, recipe_named
from rlcore.algorithms.segments import BatchError
from tests.rlcore.algorithms.batches import random_batch

LENGTHS = [4, 1, 6, 2, 5]
MAX_TOKENS = 8


def update(recipe, micro_batches):
    """Loss and metrics of an update as the trainer makes them, and the gradient of each batch."""
    outputs = [policy_loss(recipe, **b.arguments(), max_tokens=MAX_TOKENS) for b in micro_batches]
    weight = sum(o.weight for o in outputs)
    loss = sum(o.loss_sum for o in outputs) / weight
    loss.backward()
    metrics = {
        name: sum(o.metrics[name][0] for o in outputs) / sum(o.metrics[name][1] for o in outputs)
        for name in outputs[0].metrics
    }
    return loss.detach(), torch.cat([b.logprobs.grad for b in micro_batches]), metrics


@settings(max_examples=25)
@given(
    name=st.sampled_from(sorted(RECIPES)),
    correction=st.sampled_from(sorted(CORRECTIONS)),
    kl=st.sampled_from([0.0, 0.3]),
    owner=st.lists(st.integers(0, 2), min_size=len(LENGTHS), max_size=len(LENGTHS)),
    seed=st.integers(0, 5),
)
def test_an_update_does_not_depend_on_how_the_batch_is_cut(name, correction, kl, owner, seed):
    """Sequences in any order over up to three micro-batches, numbered as in the whole."""
    recipe = replace(RECIPES[name], correction=correction, correction_bounds=(0.6, 1.5))
    recipe = replace(recipe, kl_coefficient=kl)
    whole = random_batch(LENGTHS, seed)
    owner_of_token = torch.tensor(owner)[whole.sequence]
    places = [(owner_of_token == i).nonzero().flatten() for i in sorted(set(owner))]
    loss, gradient, metrics = update(recipe, [whole])
    cut_loss, cut_gradient, cut_metrics = update(recipe, [whole.take(p) for p in places])
    torch.testing.assert_close(cut_loss, loss)
    torch.testing.assert_close(cut_gradient, gradient[torch.cat(places)])
    assert cut_metrics == pytest.approx(metrics, rel=1e-5, abs=1e-9)


@settings(max_examples=25)
@given(name=st.sampled_from(sorted(RECIPES)), order=st.permutations(range(sum(LENGTHS))))
def test_the_order_of_tokens_does_not_matter(name, order):
    whole, place = random_batch(LENGTHS), torch.tensor(order)
    loss, gradient, _ = update(RECIPES[name], [whole])
    moved_loss, moved_gradient, _ = update(RECIPES[name], [whole.take(place)])
    torch.testing.assert_close(moved_loss, loss)
    torch.testing.assert_close(moved_gradient, gradient[place])


@pytest.mark.parametrize("name", RECIPES)
def test_rollouts_of_groups_that_all_agree_have_exactly_no_gradient(name):
    """With batch_norm, which compares across groups, the whole batch has to agree."""
    recipe = replace(RECIPES[name], kl_coefficient=0.0)
    batch = random_batch(LENGTHS, update=1e-5)
    rewards, group = torch.full((5,), 0.3), torch.tensor([0, 0, 0, 1, 1])
    if recipe.advantage != "batch_norm":
        rewards[3] = 1.0
    batch.advantages = ADVANTAGES[recipe.advantage](rewards, group)[batch.sequence]
    _, gradient, _ = update(recipe, [batch])
    agree = batch.sequence < (5 if recipe.advantage == "batch_norm" else 3)
    assert torch.equal(gradient[agree], torch.zeros(int(agree.sum())))
    assert gradient[~agree].any() == (recipe.advantage != "batch_norm")


@pytest.mark.parametrize("name", RECIPES)
def test_on_policy_all_recipes_give_the_policy_gradient_of_their_aggregation(name):
    recipe = replace(RECIPES[name], kl_coefficient=0.0)
    batch = random_batch(LENGTHS, update=0.0, mismatch=0.0)
    _, gradient, metrics = update(recipe, [batch])
    lengths = torch.tensor(LENGTHS)[batch.sequence]
    weight = {
        "token_mean": torch.ones(len(lengths)) / len(lengths),
        "sequence_mean": 1 / lengths / len(LENGTHS),
        "constant_length": torch.ones(len(lengths)) / MAX_TOKENS / len(LENGTHS),
    }[recipe.aggregation]
    torch.testing.assert_close(gradient, -batch.advantages * weight)
    assert metrics["ratio"] == metrics["correction"] == 1
    for name in ("update_kl", "mismatch_kl", "mismatch_k1", "clip_low", "clip_high", "masked"):
        assert metrics[name] == 0


def test_log_probabilities_in_bfloat16_are_computed_with_in_float32():
    batch = random_batch(LENGTHS)
    half = batch.take(torch.arange(sum(LENGTHS)))
    for field, value in half.arguments().items():
        if value.is_floating_point():
            setattr(half, field, value.detach().bfloat16())
            setattr(batch, field, value.detach().bfloat16().float())
    half.logprobs.requires_grad_()
    batch.logprobs.requires_grad_()
    loss, gradient, _ = update(RECIPES["grpo"], [half])
    expected, expected_gradient, _ = update(RECIPES["grpo"], [batch])
    assert torch.equal(loss, expected)
    torch.testing.assert_close(gradient.float(), expected_gradient, rtol=0.01, atol=1e-3)


def test_the_kl_term_pulls_towards_the_reference():
    batch = random_batch(LENGTHS, update=0.0)
    batch.advantages = torch.zeros_like(batch.advantages)
    for estimator in ("k2", "k3"):
        batch.logprobs.grad = None
        recipe = replace(RECIPES["grpo"], kl_coefficient=0.5, kl_estimator=estimator)
        _, gradient, metrics = update(recipe, [batch])
        assert torch.equal(gradient > 0, batch.logprobs > batch.ref_logprobs)
        assert metrics["reference_kl"] > 0


def test_a_batch_without_sampled_tokens_has_no_weight():
    batch = random_batch([3]).take(torch.zeros(0, dtype=torch.int64))
    for recipe in RECIPES.values():
        output = policy_loss(recipe, **batch.arguments(), max_tokens=MAX_TOKENS)
        assert (float(output.loss_sum.detach()), output.weight) == (0.0, 0.0)


def test_an_unknown_recipe_is_answered_with_the_names():
    with pytest.raises(RecipeError) as error:
        recipe_named("gpro")
    assert all(name in str(error.value) for name in RECIPES)
    assert recipe_named("reinforce++").advantage == "batch_norm"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("advantage", "gae"),
        ("loss", "dpo"),
        ("aggregation", "sum"),
        ("correction", "tis"),
        ("kl_estimator", "k1"),
        ("clip_low", -0.1),
        ("clip_low", 1.1),
        ("clip_high", float("nan")),
        ("clip_high", "0.28"),
        ("dual_clip", 1.1),
        ("dual_clip", "3"),
        ("correction_bounds", (2.0, 1.0)),
        ("correction_bounds", [1.0]),
        ("correction_bounds", 5),
        ("correction_bounds", "ab"),
        ("dynamic_sampling", "no"),
        ("kl_coefficient", -1.0),
        ("overlong_buffer", 4096),
    ],
)
def test_a_bad_part_of_a_recipe_is_named(field, value):
    with pytest.raises(RecipeError, match=f"recipe dapo: {field} is"):
        replace(RECIPES["dapo"], **{field: value})


def test_bounds_may_come_as_a_list_from_a_file():
    recipe = replace(RECIPES["dapo"], correction_bounds=[0.5, 5])
    assert recipe.bounds == (0.5, 5)
    assert hash(recipe) == hash(replace(recipe))


def test_dual_clip_is_refused_where_it_would_do_nothing():
    with pytest.raises(RecipeError, match="with the loss ppo"):
        replace(RECIPES["gspo"], dual_clip=3.0)


def test_a_missing_reference_is_refused():
    batch = random_batch(LENGTHS)
    arguments = batch.arguments() | {"ref_logprobs": None}
    with pytest.raises(RecipeError, match="reference policy"):
        policy_loss(RECIPES["grpo"], **arguments, max_tokens=MAX_TOKENS)
    assert "reference_kl" not in policy_loss(RECIPES["dapo"], **arguments, max_tokens=8).metrics


def test_the_entropy_bonus_rewards_entropy_and_needs_it():
    batch = random_batch(LENGTHS)
    recipe = replace(RECIPES["dapo"], entropy_coefficient=0.1)
    with pytest.raises(RecipeError, match="entropies"):
        policy_loss(recipe, **batch.arguments(), max_tokens=MAX_TOKENS)
    entropies = torch.rand(sum(LENGTHS)).requires_grad_()
    with_bonus = policy_loss(
        recipe, **batch.arguments(), max_tokens=MAX_TOKENS, entropies=entropies
    )
    without = policy_loss(RECIPES["dapo"], **batch.arguments(), max_tokens=MAX_TOKENS)
    difference = with_bonus.loss_sum - without.loss_sum
    torch.testing.assert_close(difference, -0.1 * entropies.sum())
    with_bonus.loss_sum.backward()
    assert (entropies.grad < 0).all()


@pytest.mark.parametrize("field", ["old_logprobs", "inference_logprobs", "advantages"])
def test_tensors_that_do_not_fit_are_refused_by_name(field):
    batch = random_batch(LENGTHS)
    arguments = batch.arguments()
    arguments[field] = arguments[field][:-1]
    with pytest.raises(BatchError, match=f"{field} has shape"):
        policy_loss(RECIPES["dapo"], **arguments, max_tokens=MAX_TOKENS)
