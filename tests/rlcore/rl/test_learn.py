"""The trainer's side: a batch moves the policy to what was rewarded, the same way every time."""

from __future__ import annotations

import dataclasses
import json
import math
import random
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from rlcore.algorithms.corrections import CORRECTIONS
from rlcore.asynchrony.token_ledger import Fate
from rlcore.policy.model import sampled_logprobs
from rlcore.policy.packing import WeightedRollout, pack
from rlcore.rl.export import export, export_adapter
from rlcore.rl.learn import PolicyLearner
from rlcore.rollout import Rollout
from tests.rlcore.rl.made import VOCABULARY, a_rollout, make_policy, make_settings

GOOD, BAD = 7, 11


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    return make_policy(tmp_path_factory.mktemp("learn") / "base")


def a_learner(base: Path, **changed) -> PolicyLearner:
    return PolicyLearner(make_settings(base.parent / "out", **changed), base, threads=1)


def a_batch(seed: int = 0, groups: int = 3, rewards: tuple[float, ...] = (1.0, 0.0)) -> list:
    """Groups in which the first rollout says GOOD and the second BAD."""
    draw = random.Random(seed)
    return [
        [
            a_rollout(
                f"{g}.{i}",
                prompt=prompt,
                sampled=[(GOOD, BAD)[i], draw.randrange(VOCABULARY)],
                logprob=-3.0,
                reward=rewards[i],
            )
            for i in range(2)
        ]
        for g in range(groups)
        for prompt in [[draw.randrange(VOCABULARY) for _ in range(4)]]
    ]


def probability(learner: PolicyLearner, group: list[Rollout], token: int) -> float:
    with torch.no_grad():
        prompt = torch.tensor([group[0].token_ids[: group[0].prompt_length]])
        return float(learner.policy(prompt).logits[0, -1].softmax(-1)[token])


def parameters(learner: PolicyLearner) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in learner.policy.named_parameters()}


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.parametrize("algorithm", ["grpo", "dr_grpo", "dapo", "rloo", "reinforce++", "gspo"])
def test_a_batch_moves_the_policy_to_what_was_rewarded(base, algorithm):
    learner = a_learner(base, algorithm=algorithm, recipe={"correction": "none"})
    batch = a_batch()
    before = [(probability(learner, g, GOOD), probability(learner, g, BAD)) for g in batch]
    for _ in range(3):
        report = learner.train(batch, 0)
        assert report.taken == 1
    for group, (good, bad) in zip(batch, before, strict=True):
        assert probability(learner, group, GOOD) > good
        assert probability(learner, group, BAD) < bad


def test_a_batch_computes_with_the_threads_set_before_it_whichever_thread_that_is(
    base, monkeypatch
):
    learner = a_learner(base)
    seen: list[tuple[str, int]] = []
    update = learner.trainer.update

    def watched(batches):
        seen.append((threading.current_thread().name, torch.get_num_threads()))
        return update(batches)

    monkeypatch.setattr(learner.trainer, "update", watched)
    before = torch.get_num_threads()
    with ThreadPoolExecutor(1, "trainer") as pool:
        for learner.threads in (2, 1, 2):
            pool.submit(learner.train, a_batch(), 0).result()
    assert seen == [("trainer_0", 2), ("trainer_0", 1), ("trainer_0", 2)]
    assert torch.get_num_threads() == before, "another thread's number is its own"


def test_the_report_counts_sampled_tokens_and_shared_prompts_once(base):
    report = a_learner(base, optimiser={"micro_batch_tokens": 64, "device": "cpu"}).train(
        a_batch(groups=3), 0
    )
    assert report.tokens == [3 * 2 * 2]
    assert report.computed == 3 * (4 + 2 * 2)
    figures = report.metrics()
    assert {"loss", "grad_norm", "mismatch_kl", "policy_entropy"} <= figures.keys()


def test_the_same_seed_gives_the_same_policy_and_another_batch_another(base):
    learners = [a_learner(base) for _ in range(3)]
    for learner, seed in zip(learners, [0, 0, 1], strict=True):
        learner.train(a_batch(seed), 0)
    assert same(parameters(learners[0]), parameters(learners[1]))
    assert not same(parameters(learners[0]), parameters(learners[2]))


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_a_resumed_learner_goes_on_bit_for_bit(base, precision):
    options = {"lr": 3e-3, "micro_batch_tokens": 16, "device": "cpu", "precision": precision}
    whole, first, second = (a_learner(base, optimiser=options) for _ in range(3))
    for learner in (whole, first):
        learner.train(a_batch(0), 0)
    tensors, counters = first.state()
    second.load_state(tensors, json.loads(json.dumps(counters)))
    for learner in (whole, second):
        learner.train(a_batch(1), 1)
    assert same(parameters(whole), parameters(second))
    assert second.trainer.updates == 2


def test_several_updates_on_a_batch_are_off_policy_from_the_second_on(base):
    options = {"lr": 3e-3, "micro_batch_tokens": 16, "device": "cpu", "updates_per_batch": 2}
    learner = a_learner(base, optimiser=options)
    report = learner.train(a_batch(groups=4), 0)
    assert [update.update for update in report.updates] == [1, 2]
    assert report.tokens == [2 * 2 * 2] * 2
    assert report.before == [0, 1, 0, 1]
    first, second = (update.metrics["ratio"] for update in report.updates)
    assert first == pytest.approx(1.0, abs=1e-6)
    assert abs(second - 1.0) > 1e-6, "the policy has moved since its old log-probabilities"


def test_more_updates_than_groups_are_as_many_as_groups(base):
    options = {"lr": 3e-3, "device": "cpu", "updates_per_batch": 4}
    learner = a_learner(base, optimiser=options, max_off_policy_steps=3)
    report = learner.train(a_batch(groups=2), 0)
    assert (len(report.updates), report.before) == (2, [0, 1])


def test_the_update_does_not_depend_on_the_micro_batches(base):
    found = []
    for tokens in (16, 4096):
        learner = a_learner(base, optimiser={"lr": 3e-3, "device": "cpu"})
        learner.micro_batch_tokens = tokens
        learner.train(a_batch(groups=4), 0)
        found.append(parameters(learner))
    for name, value in found[0].items():
        torch.testing.assert_close(value, found[1][name], atol=1e-4, rtol=1e-3)


def test_equal_rewards_change_nothing(base):
    learner = a_learner(base)
    before = parameters(learner)
    learner.train(a_batch(rewards=(1.0, 1.0)), 0)
    assert same(before, parameters(learner))


def test_a_batch_in_which_nothing_was_sampled_is_no_update(base):
    learner = a_learner(base)
    empty = [[a_rollout(f"0.{i}", sampled=[], reward=float(i)) for i in range(2)]]
    report = learner.train(empty, 0)
    assert not report.taken
    assert report.metrics() == {}


@pytest.mark.parametrize("correction", sorted(CORRECTIONS))
@pytest.mark.parametrize("algorithm", ["grpo", "reinforce++", "rloo"])
def test_every_sampled_token_has_one_fate(base, correction, algorithm):
    """Some groups have equal rewards, and some tokens are far from what the trainer would sample."""
    draw = random.Random(3)
    learner = a_learner(base, algorithm=algorithm, recipe={"correction": correction})
    for version in range(3):
        groups = [
            [
                a_rollout(
                    f"{g}.{i}",
                    sampled=[draw.randrange(VOCABULARY) for _ in range(draw.randrange(4))],
                    logprob=-draw.choice([0.1, 3.0, 30.0]),
                    reward=float(g and i),
                )
                for i in range(2)
            ]
            for g in range(3)
        ]
        fates = learner.train(groups, version).fates()
        assert sum(fates.values()) == sum(r.sampled for group in groups for r in group)
        assert fates == expected_fates(learner, groups, fates)


def expected_fates(learner: PolicyLearner, groups: list, found: dict[Fate, int]) -> dict[Fate, int]:
    """What can be told from outside: groups that teach nothing, and corrections that mask nothing."""
    expected = dict(found)
    if learner.recipe.advantage != "batch_norm":
        expected[Fate.ZERO_ADVANTAGE] = sum(r.sampled for r in groups[0])
    if learner.recipe.correction in ("none", "token_tis", "sequence_tis"):
        expected[Fate.MASKED] = 0
    return expected


@pytest.mark.parametrize(
    ("correction", "masked"),
    [("icepop", 6), ("sequence_mask", 6), ("geometric_mask", 6), ("none", 0)],
)
def test_what_a_correction_masks_is_not_counted_as_trained(base, correction, masked):
    """All tokens were sampled with a probability that the trainer gives to none of them."""
    learner = a_learner(base, recipe={"correction": correction})
    groups = [
        [
            a_rollout(f"{g}.{i}", sampled=[5, 6, 7], logprob=-(3.8, 40.0)[i], reward=float(i))
            for i in range(2)
        ]
        for g in range(2)
    ]
    fates = learner.train(groups, 0).fates()
    assert sum(fates.values()) == 12
    assert fates[Fate.MASKED] >= masked
    assert (fates[Fate.MASKED] == 0) == (correction == "none")


def test_tokens_of_an_update_that_was_not_taken_are_counted_as_such(base):
    options = {"lr": 3e-3, "micro_batch_tokens": 16, "device": "cpu", "updates_per_batch": 2}
    learner = a_learner(base, optimiser=options, max_off_policy_steps=1)
    batch = a_batch(groups=4)
    advantages = learner._weighted

    def with_nan(groups):
        weighted = advantages(groups)
        weighted[0] = [dataclasses.replace(w, advantage=math.nan) for w in weighted[0]]
        return weighted

    learner._weighted = with_nan
    report = learner.train(batch, 0)
    assert [update.skipped for update in report.updates] == ["loss", None]
    assert report.before == [None, 0, None, 0]
    assert report.taken == 1
    assert report.fates() == {
        Fate.SKIPPED: 8, Fate.TRAINED: 8, Fate.ZERO_ADVANTAGE: 0, Fate.MASKED: 0,
    }  # fmt: skip


def test_a_kl_to_the_reference_holds_the_policy_back(base):
    pulled, free = (
        a_learner(base, algorithm="grpo", recipe={"kl_coefficient": k}) for k in (50.0, 0.0)
    )
    for _ in range(4):
        for learner in (pulled, free):
            learner.train(a_batch(), 0)

    rollouts = [rollout for group in a_batch() for rollout in group]
    weighted = [WeightedRollout(rollout, 0.0, i) for i, rollout in enumerate(rollouts)]
    (batch,) = pack(weighted, 4096, 0)

    def logprobs(learner: PolicyLearner) -> torch.Tensor:
        with torch.no_grad():
            return sampled_logprobs(learner.policy, batch)[0]

    origin = logprobs(a_learner(base))
    assert (logprobs(pulled) - origin).norm() < 0.5 * (logprobs(free) - origin).norm()


def test_the_exported_folder_opens_in_transformers_with_the_same_logits(base, tmp_path):
    learner = a_learner(base)
    learner.train(a_batch(), 0)
    (base / "tokenizer_config.json").write_text('{"a": 1}')
    folder = tmp_path / "policy"
    folder.mkdir()
    (folder / "old").touch()
    export(learner, base, folder)
    assert not (folder / "old").exists()
    assert (folder / "tokenizer_config.json").read_text() == '{"a": 1}'
    assert [path.name for path in tmp_path.iterdir()] == ["policy"]
    again = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    ids = torch.randint(VOCABULARY, (2, 9), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        assert torch.equal(again(ids).logits, learner.policy(ids).logits)


def test_what_is_published_is_the_policy_as_it_is(base):
    learner = a_learner(base)
    learner.train(a_batch(), 0)
    assert same(learner.snapshot(), parameters(learner))
    assert learner.config()["architectures"] == ["LlamaForCausalLM"]


LORA = {"lora": {"rank": 4, "alpha": 8.0}}


def test_an_adapter_learns_what_is_rewarded_and_the_base_stays_as_it_was(base):
    learner = a_learner(base, **LORA)
    frozen = {name: p for name, p in parameters(learner).items() if ".lora_" not in name}
    batch = a_batch()
    before = probability(learner, batch[0], GOOD)
    for update in range(8):
        report = learner.train(batch, update)
        assert report.taken == 1
    assert probability(learner, batch[0], GOOD) > before + 0.01
    after = parameters(learner)
    assert all(torch.equal(after[name], p) for name, p in frozen.items())
    assert all(".lora_" in name for name in learner.trainer.optimizer.parameters)


def test_an_adapter_is_resumed_bit_for_bit(base):
    first, second = a_learner(base, **LORA), a_learner(base, **LORA, seed=5)
    first.train(a_batch(1), 0)
    tensors, counters = first.state()
    assert all("lora" in name for name in tensors if name.startswith("module."))
    second.load_state(tensors, counters)
    for learner in (first, second):
        learner.train(a_batch(2), 1)
    for name, tensor in first.snapshot().items():
        assert torch.equal(second.snapshot()[name], tensor), name


def test_an_adapter_is_left_as_peft_opens_it_and_merged_into_a_whole_policy(base, tmp_path):
    learner = a_learner(base, **LORA)
    for update in range(4):
        learner.train(a_batch(update), update)
    export(learner, base, tmp_path / "policy")
    export_adapter(learner, tmp_path / "adapter")
    ids = torch.tensor([[3, 9, 27, 1]])
    with torch.no_grad():
        want = learner.policy(ids).logits
        merged = AutoModelForCausalLM.from_pretrained(tmp_path / "policy", dtype=torch.float32)
        torch.testing.assert_close(merged(ids).logits, want, atol=1e-5, rtol=1e-5)
        plain = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
        assert not torch.allclose(plain(ids).logits, want, atol=1e-4)
        adapted = PeftModel.from_pretrained(plain, tmp_path / "adapter")
        torch.testing.assert_close(adapted(ids).logits, want, atol=1e-5, rtol=1e-5)
    assert json.loads((tmp_path / "policy/config.json").read_text())["architectures"] == [
        "LlamaForCausalLM"
    ]
