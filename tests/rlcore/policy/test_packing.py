"""Packed rows: every rollout's log-probabilities are those of the rollout alone."""

from __future__ import annotations

import random

import pytest
import torch
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    GraniteConfig,
    GraniteForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
)

from rlcore.policy.model import PolicyError, load_policy, sampled_logprobs
from rlcore.policy.packing import PROMPT, WeightedRollout, pack
from rlcore.records.trace import Sampling
from rlcore.rollout import NOT_SAMPLED, Rollout, check_rollout

VOCABULARY = 64


def a_rollout(draw: random.Random, name: str, prompt: list[int], turns: int = 1) -> Rollout:
    ids, mask = list(prompt), [False] * len(prompt)
    for turn in range(turns):
        sampled = draw.randint(1, 6)
        ids += [draw.randrange(VOCABULARY) for _ in range(sampled)]
        mask += [True] * sampled
        if turn + 1 < turns:
            ids += [draw.randrange(VOCABULARY) for _ in range(3)]
            mask += [False] * 3
    return check_rollout(
        Rollout(
            rollout_id=name, task_id="t", group_id="g", token_ids=ids, prompt_length=len(prompt),
            loss_mask=mask, logprobs=[-draw.random() if m else 0.0 for m in mask],
            policy_versions=[0 if m else NOT_SAMPLED for m in mask],
            sampling=Sampling(temperature=draw.choice([1.0, 0.7])), draft_version=0,
            finish_reason="stop", reward=0.0,
        )
    )  # fmt: skip


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, initializer_range=0.3,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


def a_batch(seed: int) -> list[WeightedRollout]:
    draw = random.Random(seed)
    rollouts = []
    for group in range(4):
        prompt = [draw.randrange(VOCABULARY) for _ in range(draw.randint(1, 9))]
        rollouts += [a_rollout(draw, f"{group}-{i}", prompt, 1 + group % 3) for i in range(5)]
    return [WeightedRollout(r, draw.gauss(0, 1), i) for i, r in enumerate(rollouts)]


def alone(model, rollout: Rollout) -> list[float]:
    ids = torch.tensor([rollout.token_ids])
    logits = model(input_ids=ids).logits[0].double() / rollout.sampling.temperature
    logprobs = torch.log_softmax(logits, -1)
    return [
        float(logprobs[i - 1, token])
        for i, token in enumerate(rollout.token_ids)
        if rollout.loss_mask[i]
    ]


@pytest.mark.parametrize("max_tokens", [8, 64, 100_000])
def test_log_probabilities_do_not_depend_on_the_packing(model, max_tokens):
    weighted = a_batch(3)
    got: dict[int, list[float]] = {}
    with torch.no_grad():
        for batch in pack(weighted, max_tokens, 0):
            logprobs, _ = sampled_logprobs(model, batch)
            for sequence, value in zip(batch.sequence.tolist(), logprobs.tolist(), strict=True):
                got.setdefault(sequence, []).append(value)
        want = {w.sequence: alone(model, w.rollout) for w in weighted}
    assert got.keys() == want.keys()
    for sequence, values in want.items():
        assert got[sequence] == pytest.approx(values, abs=1e-5)


@pytest.mark.parametrize("seed", range(5))
def test_every_sampled_token_is_there_once_with_its_own_stream(seed):
    weighted = a_batch(seed)
    rows = [
        (s, label, round(p, 6), round(a, 6))
        for batch in pack(weighted, 64, 0)
        for s, label, p, a in zip(
            batch.sequence.tolist(), batch.labels.tolist(), batch.inference_logprobs.tolist(),
            batch.advantages.tolist(), strict=True,
        )
    ]  # fmt: skip
    want = [
        (w.sequence, token, round(w.rollout.logprobs[i], 6), round(w.advantage, 6))
        for w in weighted
        for i, token in enumerate(w.rollout.token_ids)
        if w.rollout.loss_mask[i]
    ]
    for got, expected in zip(sorted(rows), sorted(want), strict=True):
        assert got == pytest.approx(expected, abs=2e-6)


@pytest.mark.parametrize("seed", range(5))
def test_the_budget_holds_wherever_a_rollout_alone_keeps_it(seed):
    weighted = a_batch(seed)
    longest = max(len(w.rollout.token_ids) for w in weighted)
    for batch in pack(weighted, longest, 0):
        assert batch.token_ids.numel() <= longest


def test_a_prompt_shared_by_a_group_is_computed_once():
    draw = random.Random(0)
    prompt = list(range(20))
    weighted = [WeightedRollout(a_rollout(draw, str(i), prompt), 1.0, i) for i in range(8)]
    (batch,) = pack(weighted, 10_000, 0)
    assert int((batch.segments == PROMPT).sum()) == len(prompt)


def test_a_rollout_that_sampled_nothing_is_left_out():
    draw = random.Random(0)
    empty = Rollout(
        rollout_id="e", task_id="t", group_id="g", token_ids=[1, 2], prompt_length=2,
        loss_mask=[False, False], logprobs=[0.0, 0.0], policy_versions=[NOT_SAMPLED] * 2,
        sampling=Sampling(), draft_version=0, finish_reason="stop", reward=0.0,
    )  # fmt: skip
    check_rollout(empty)
    batches = pack(
        [WeightedRollout(empty, 1.0, 0), WeightedRollout(a_rollout(draw, "a", [1]), 1.0, 1)], 64, 0
    )
    assert {s for batch in batches for s in batch.sequence.tolist()} == {1}
    assert pack([WeightedRollout(empty, 1.0, 0)], 64, 0) == []


def test_a_model_without_a_decoder_and_an_output_layer_is_refused_in_one_line(tmp_path):
    config = GPT2Config(vocab_size=VOCABULARY, n_embd=8, n_layer=1, n_head=1)
    GPT2LMHeadModel(config).save_pretrained(tmp_path)
    with pytest.raises(PolicyError, match="GPT2LMHeadModel"):
        load_policy(tmp_path)


def test_a_model_that_scales_its_logits_is_refused_in_one_line(tmp_path):
    config = GraniteConfig(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=64, num_hidden_layers=1,
        num_attention_heads=4, num_key_value_heads=2, logits_scaling=4.0,
    )  # fmt: skip
    GraniteForCausalLM(config).save_pretrained(tmp_path)
    with pytest.raises(PolicyError, match="GraniteForCausalLM changes the logits") as refused:
        load_policy(tmp_path)
    assert "\n" not in str(refused.value)
