"""Speculation changes speed, never the output (invariant 1): off, on, and across swaps in mid-request.

Greedy: the embedded model in float32, 56 prompts of 48 tokens. Token-identical to no speculation,
except where the reference's two best logits lie within 1e-3 (one prompt at most), and every emitted
token within 1e-3 of the reference's best. The reference is transformers in float32, teacher-forced.

Sampled: through the whole engine with a tiny target, so that tens of thousands of tokens can be had.
Each emitted token is compared with the exact distribution transformers gives for its prefix,
as processed by temperature and top-p; once by the token's rank in that distribution and once by its
id. The smallest total variation (of the mean distribution over these cells) detected with 99 % power
at alpha 0.001 is asserted to be 0.02, the same that the test of the bare sampler detects.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from learner.drafters.draft_model import DraftModel
from learner.target import Target
from tests.e2e import offline, tiny
from tests.e2e.prompts import PROMPTS
from tests.rlcore.engine.goodness import ALPHA, TOTAL_VARIATION, detectable, sequential_p_value

pytestmark = pytest.mark.slow

torch.set_num_threads(1)

TOKENS = 48
NEAR = 1e-3
GREEDY = {"temperature": 0.0, "max_tokens": TOKENS}


# --- greedy ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def prompts(embedded_model: Path) -> list[list[int]]:
    tokenizer = AutoTokenizer.from_pretrained(embedded_model)
    return [tokenizer(text)["input_ids"] for text in PROMPTS]


@pytest.fixture(scope="module")
def reference(embedded_model):
    return AutoModelForCausalLM.from_pretrained(embedded_model, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def plain(embedded_model, prompts) -> list[list[int]]:
    """The outputs without speculation."""
    (result,) = offline.run(
        offline.job(embedded_model, None, "", 0),
        [offline.generate(prompts, [GREEDY] * len(prompts))],
    )
    return result["tokens"]


@torch.no_grad()
def logits_after(model, prompt: list[int], output: list[int]) -> torch.Tensor:
    """[len(output), V]: row i is what the reference thinks of ``output[i]``."""
    ids = torch.tensor([[*prompt, *output[:-1]]])
    return model(ids).logits[0, len(prompt) - 1 :].float()


def check_near_best(model, prompt: list[int], output: list[int]) -> None:
    """Every emitted token is within NEAR of the best one."""
    assert len(output) == TOKENS
    logits = logits_after(model, prompt, output)
    chosen = logits.gather(1, torch.tensor(output)[:, None]).squeeze(1)
    assert float((logits.amax(-1) - chosen).max()) <= NEAR


def check_same(model, prompts, outputs, plain) -> None:
    """Equal to the outputs without speculation, but for a near tie in one prompt of 50."""
    different = 0
    for prompt, output, want in zip(prompts, outputs, plain, strict=True):
        if output == want:  # and that one is checked by itself
            continue
        different += 1
        check_near_best(model, prompt, output)
        at = next(i for i, (a, b) in enumerate(zip(output, want, strict=True)) if a != b)
        best = logits_after(model, prompt, want)[at].topk(2).values
        assert float(best[0] - best[1]) <= NEAR, f"{prompt} differs at token {at}"
    print(f"{different} of {len(prompts)} prompts differ, at near ties")
    assert different <= len(prompts) // 50


def test_without_speculation_the_engine_is_the_reference(plain, prompts, reference):
    assert len(prompts) >= 50
    for prompt, output in zip(prompts, plain, strict=True):
        check_near_best(reference, prompt, output)


def acceptance(results) -> dict[str, float]:
    return {version: a / max(d, 1) for version, (d, a) in results.items()}


@pytest.mark.parametrize("method", ["draft_model", "eagle3"])
def test_greedy_output_is_the_same_with_speculation_and_across_swaps(
    method, embedded_model, prompts, reference, plain, tmp_path
):
    target = Target.open(embedded_model)
    good, other = tmp_path / "good", tmp_path / "other"
    if method == "draft_model":
        # The whole target is nearly always right; disturbed, it is right now and then.
        whole = DraftModel.build(target, layers=target.layers)
        whole.save(good)
        tiny.disturbed(whole, 0.15, seed=1).save(other)
    else:
        tiny.eagle(target, 1, 2048).save(good)
        tiny.eagle(target, 2, 2048).save(other)
    swaps = {3: (other, 1), 6: (good, 2), 8: (other, 3), 11: (good, 4)}
    requests = (prompts, [GREEDY] * len(prompts))
    on, counts, swapped, counts_after, _digest = offline.run(
        offline.job(embedded_model, good, method, 3 if method == "draft_model" else 1),
        [
            offline.generate(*requests),
            offline.rpc("test_acceptance"),
            offline.generate(*requests, swaps=swaps),
            offline.rpc("test_acceptance"),
            offline.rpc("test_target_digest"),
        ],
    )
    print(method, "accepted, by version:", acceptance(counts_after), "steps", on["steps"])
    for report in swapped["swaps"]:
        assert report["error"] is None
        assert report["running"] == len(prompts), "the swap must meet running requests"
    assert len(swapped["swaps"]) == len(swaps)
    assert counts_after.keys() == {"0", "1", "2", "3", "4"}, "every version must have drafted"
    if method == "draft_model":
        assert acceptance(counts)["0"] > 0.9
        assert 0.05 < acceptance(counts_after)["1"] < 0.9
    for outputs in (on["tokens"], swapped["tokens"]):
        check_same(reference, prompts, outputs, plain)


# --- sampled -----------------------------------------------------------------------------------

VOCAB = 16
STREAMS = 48
LENGTH = 900
SAMPLING = (
    {"temperature": 1.0, "top_p": 1.0},
    {"temperature": 0.7, "top_p": 0.9},
    {"temperature": 0.0},
)
"""Requests of all three stand in every batch; the first two are sampled."""


def processed(logits: torch.Tensor, temperature: float, top_p: float) -> np.ndarray:
    """[n, V] probabilities as temperature and top-p leave them."""
    p = (logits.double() / temperature).softmax(-1)
    ordered, order = p.sort(descending=True, stable=True)
    ordered[ordered.cumsum(-1) - ordered >= top_p] = 0.0
    p = torch.zeros_like(p).scatter(1, order, ordered)
    return (p / p.sum(-1, keepdim=True)).numpy()


def test_sampled_output_follows_the_targets_distribution_with_speculation_and_across_swaps(
    tmp_path,
):
    model = tiny.make_target(tmp_path / "target", VOCAB, sharpness=1.5)
    target = Target.open(tmp_path / "target")
    folders = [tmp_path / "a", tmp_path / "b"]
    for seed, folder in enumerate(folders, start=1):
        tiny.draft_model(target, layers=8, amount=0.3, seed=seed).save(folder)
    sampled = 2 * STREAMS
    prompts = [[1 + i % 3, 2 + i % 7, 3] for i in range(sampled + 4)]
    kinds = [i % 2 for i in range(sampled)] + [2] * 4
    sampling = [
        SAMPLING[kind] | {"max_tokens": LENGTH, "seed": 1000 + i} for i, kind in enumerate(kinds)
    ]
    swaps = {step: (folders[(step // 60) % 2], step) for step in range(60, 241, 60)}
    generated, counts, _drafts = offline.run(
        offline.job(
            tmp_path / "target", folders[0], "draft_model", 3, max_model_len=1024, max_num_seqs=128
        ),
        [
            offline.generate(prompts, sampling, swaps),
            offline.rpc("test_acceptance"),
            offline.rpc("test_drafts"),
        ],
    )
    rates = acceptance(counts)
    assert len(generated["swaps"]) == len(swaps)
    assert all(report["error"] is None for report in generated["swaps"])
    assert len(rates) == len(swaps) + 1
    assert all(0.1 < rate < 0.95 for rate in rates.values()), rates

    outputs = generated["tokens"]
    for kind in (0, 1):
        rows, chosen = [], []
        for index in (i for i, k in enumerate(kinds) if k == kind):
            logits = logits_after(model, prompts[index], outputs[index])
            rows.append(processed(logits, **SAMPLING[kind]))
            chosen += outputs[index]
        p, ids = np.concatenate(rows), np.array(chosen)
        # A token at the very edge of top-p may fall to either side by rounding.
        possible = p[np.arange(len(ids)), ids] > 0
        assert (~possible).mean() < 1e-4
        p, ids = p[possible], ids[possible]
        order = np.argsort(-p, axis=1, kind="stable")
        ranks = np.argsort(order, axis=1)[np.arange(len(ids)), ids]
        for cells, chosen_cells, table in (
            ("ranks", ranks, np.take_along_axis(p, order, 1)),
            ("ids", ids, p),
        ):
            value, freedom = sequential_p_value(chosen_cells, table)
            power = detectable(freedom, len(ids))
            print(
                f"{SAMPLING[kind]} by {cells}: {len(ids)} tokens, p value {value:.3f}, detects a "
                f"total variation of {power:.4f} (99 % power, alpha {ALPHA})"
            )
            assert power <= TOTAL_VARIATION
            assert value > ALPHA
            assert sequential_p_value(*biased(chosen_cells, table))[0] < ALPHA
    for index in range(sampled, sampled + 4):
        logits = logits_after(model, prompts[index], outputs[index])
        picked = logits.gather(1, torch.tensor(outputs[index])[:, None]).squeeze(1)
        assert float((logits.amax(-1) - picked).max()) <= NEAR


def biased(chosen: np.ndarray, table: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The same draws with 2 % of them moved to the likeliest cell: the test must see it."""
    moved = np.random.default_rng(0).permutation(np.flatnonzero(chosen != table.sum(0).argmax()))
    changed = chosen.copy()
    changed[moved[: int(TOTAL_VARIATION * len(chosen))]] = table.sum(0).argmax()
    return changed, table
