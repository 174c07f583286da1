"""The engine's own rejection sampler keeps the target's distribution (invariant 1).

Power: each tested position gets at least ``needed_samples(V - 1)`` emitted tokens, about 26,000 for
the eight tokens here, so a total variation of 0.02 is rejected with at least 99 % power at alpha
0.001 (the calculation is in ``goodness``). The test shows it: a sampler biased by exactly 0.02 is
rejected every time.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from vllm.triton_utils import HAS_TRITON
from vllm.v1.sample import rejection_sampler
from vllm.v1.sample.logits_processor import LogitsProcessors
from vllm.v1.sample.metadata import SamplingMetadata
from vllm.v1.sample.sampler import Sampler
from vllm.v1.spec_decode.metadata import SpecDecodeMetadata

from rlcore.engine.fixes import apply_fixes
from tests.rlcore.engine.goodness import (
    ALPHA,
    POWER,
    TOTAL_VARIATION,
    needed_samples,
    p_value,
)

torch.set_num_threads(1)

VOCAB = 8
DRAFTS = 3
NEEDED = needed_samples(VOCAB - 1)
BATCH = 8000
"""Requests of a batch; one in four belongs to each kind below."""

# What the target thinks at each of the four positions, and the drafter at the first three.
TARGET = torch.tensor(
    [
        [3.0, 1.6, 1.2, 0.6, 0.2, -0.2, -0.6, -1.0],
        [0.4, 2.9, -0.5, 1.5, 0.1, 1.1, -1.0, -0.3],
        [0.5, 0.0, 3.1, -0.4, 1.6, -1.0, 0.3, 1.2],
        [1.0, 0.8, 0.6, 0.4, 0.2, 0.0, -0.4, -0.8],
    ]
)
DRAFTER = TARGET[:3] * 0.8 + torch.linspace(0.5, -0.4, VOCAB).roll(3)
ONE_HOT = torch.tensor([0, 1, 2])


@dataclass(frozen=True)
class Kind:
    temperature: float
    top_p: float
    drafts: int

    def probabilities(self, position: int) -> np.ndarray:
        """The target's distribution as these parameters process it."""
        if self.temperature == 0:
            return np.eye(VOCAB)[int(TARGET[position].argmax())]
        p = (TARGET[position].double() / self.temperature).softmax(-1).numpy()
        order = np.argsort(-p, kind="stable")
        before = np.cumsum(p[order]) - p[order]
        p[order[before >= self.top_p]] = 0.0
        return p / p.sum()


BATCHES = 100
KINDS = (Kind(1.0, 1.0, 3), Kind(0.7, 0.9, 3), Kind(0.0, 1.0, 3), Kind(1.0, 1.0, 1))
"""Requests of all kinds stand in the same batch, one after the other."""


def sample(probabilistic: bool, batches: int) -> np.ndarray:
    """[batches * BATCH, DRAFTS + 1] emitted tokens; -1 behind the first rejection."""
    kinds = [KINDS[i % len(KINDS)] for i in range(BATCH)]
    counts = torch.tensor([kind.drafts for kind in kinds])
    cumulative = counts.cumsum(0)
    row = torch.arange(int(counts.sum() + BATCH))
    request = torch.repeat_interleave(torch.arange(BATCH), counts + 1)
    place = row - (cumulative - counts + torch.arange(BATCH))[request]
    is_bonus = place == counts[request]
    place_of_drafts = place[~is_bonus]
    q = DRAFTER.softmax(-1)
    metadata = SamplingMetadata(
        temperature=torch.tensor([kind.temperature for kind in kinds]),
        all_greedy=False,
        all_random=False,
        top_p=torch.tensor([kind.top_p for kind in kinds]),
        top_k=None,
        generators={},
        max_num_logprobs=None,
        no_penalties=True,
        prompt_token_ids=None,
        frequency_penalties=torch.zeros(BATCH),
        presence_penalties=torch.zeros(BATCH),
        repetition_penalties=torch.ones(BATCH),
        output_token_ids=[[] for _ in range(BATCH)],
        allowed_token_ids_mask=None,
        bad_words_token_ids={},
        logitsprocs=LogitsProcessors(),
        spec_token_ids=[[] for _ in range(BATCH)],
    )
    sampler = rejection_sampler.RejectionSampler(Sampler())
    outputs = []
    for _ in range(batches):
        if probabilistic:
            drafts = torch.multinomial(q[place_of_drafts], 1).squeeze(1)
        else:
            drafts = ONE_HOT[place_of_drafts]
        plan = SpecDecodeMetadata(
            draft_token_ids=drafts.to(torch.int32),
            num_draft_tokens=counts.tolist(),
            cu_num_draft_tokens=cumulative.to(torch.int32),
            cu_num_sampled_tokens=(counts + 1).cumsum(0).to(torch.int32),
            target_logits_indices=row[~is_bonus].to(torch.int32),
            bonus_logits_indices=row[is_bonus].to(torch.int32),
            logits_indices=row.to(torch.int32),
        )
        output = sampler(
            plan,
            q[place_of_drafts].contiguous() if probabilistic else None,
            TARGET[place].clone(),
            metadata,
        )
        outputs.append(output.sampled_token_ids.numpy())
    return np.concatenate(outputs)


def p_values(tokens: np.ndarray, enough: bool = True) -> dict[tuple[int, int], float]:
    """By (kind, position): of the tokens emitted there, given that the position was reached."""
    result = {}
    for index, kind in enumerate(KINDS):
        rows = tokens[index :: len(KINDS)]
        for position in range(kind.drafts + 1):
            emitted = rows[:, position][rows[:, position] >= 0]
            counts = np.bincount(emitted, minlength=VOCAB)
            if kind.temperature > 0 and enough:
                assert len(emitted) >= NEEDED, (kind, position, len(emitted))
            probabilities = kind.probabilities(position)
            assert kind.temperature == 0 or (probabilities > 0).sum() >= 3, (
                "nothing is sampled here"
            )
            result[index, position] = p_value(counts, probabilities)
    return result


@pytest.fixture(autouse=True)
def repaired(kernels):
    apply_fixes()


@pytest.mark.parametrize("probabilistic", [False, True], ids=["one-hot drafts", "sampled drafts"])
def test_emitted_tokens_follow_the_target_in_a_mixed_batch(probabilistic):
    torch.manual_seed(20261130)
    values = p_values(sample(probabilistic, batches=BATCHES))
    print(f"{NEEDED} samples or more at each position; p values {values}")
    assert {where: p for where, p in values.items() if p < ALPHA} == {}


def test_greedy_requests_emit_the_targets_best_token_and_stop_at_the_first_wrong_draft():
    torch.manual_seed(0)
    tokens = sample(True, batches=2)[2 :: len(KINDS)]
    best = TARGET.argmax(-1).numpy()
    for row in tokens:
        emitted = row[row >= 0]
        assert len(emitted) >= 1
        assert (emitted == best[: len(emitted)]).all()


def test_a_sampler_biased_by_two_hundredths_is_rejected(monkeypatch):
    """It accepts the one-hot draft with probability p + 0.02: a total variation of exactly 0.02."""
    shipped = rejection_sampler._rejection_random_sample
    draft = int(ONE_HOT[0])

    def biased(output, cumulative, drafts, draft_probs, probs, bonus, recovered, uniform, *rest):
        p = probs.gather(1, drafts.long()[:, None]).squeeze(1)
        uniform = torch.where(drafts == draft, uniform * p / (p + TOTAL_VARIATION), uniform)
        shipped(output, cumulative, drafts, draft_probs, probs, bonus, recovered, uniform, *rest)

    biased.register_warmup = shipped.register_warmup
    monkeypatch.setattr(rejection_sampler, "_rejection_random_sample", biased)
    repeats = 20
    rejected = 0
    for repeat in range(repeats):
        torch.manual_seed(repeat)
        tokens = sample(False, batches=-(-NEEDED // (BATCH // len(KINDS))))
        rejected += p_values(tokens, enough=False)[0, 0] < ALPHA
    print(f"the biased sampler was rejected {rejected} times of {repeats}")
    assert rejected >= 18  # fewer has a probability of 0.001 when the power is 0.99


def test_the_needed_samples_have_the_stated_power_against_the_hardest_bias():
    """The least visible bias spreads over all tokens in proportion to p."""
    rng = np.random.default_rng(0)
    p = Kind(1.0, 1.0, 3).probabilities(3)
    up = np.zeros(VOCAB, bool)
    for i in np.argsort(-p):  # split the mass as evenly as possible
        up[i] = p[up].sum() + p[i] <= 0.5
    q = np.where(
        up, p * (1 + TOTAL_VARIATION / p[up].sum()), p * (1 - TOTAL_VARIATION / p[~up].sum())
    )
    assert abs(q - p).sum() / 2 == pytest.approx(TOTAL_VARIATION)
    rejected = np.mean([p_value(rng.multinomial(NEEDED, q), p) < ALPHA for _ in range(1000)])
    falsely = np.mean([p_value(rng.multinomial(NEEDED, p), p) < ALPHA for _ in range(1000)])
    print(f"power {rejected:.3f} at {NEEDED} samples, false alarms {falsely:.4f}")
    assert rejected > POWER - 0.01  # three standard errors of 1,000 repeats
    assert falsely < 0.006


@pytest.mark.skipif(HAS_TRITON, reason="with Triton the shipped function is right")
def test_the_sampler_as_shipped_is_rejected(monkeypatch):
    """What the repair is for: temperatures and top-p out of uninitialised memory."""

    def uninitialised(x, cumulative, tokens, replace_from=0, replace_to=0):
        return torch.ones(tokens, dtype=x.dtype)

    monkeypatch.setattr(rejection_sampler, "expand_batch_to_tokens", uninitialised)
    torch.manual_seed(1)
    values = p_values(sample(False, batches=20), enough=False)
    assert values[1, 0] < ALPHA
