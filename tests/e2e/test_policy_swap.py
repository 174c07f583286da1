"""A policy swap: every token is known by the version that sampled it, nothing of the old version is left
behind it, and one that fails changes nothing (invariants 2 and 5)."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, Qwen2Config, Qwen2ForCausalLM

from learner.target import Target
from tests.e2e import offline, tiny
from tests.e2e.faulty_worker import STAGES
from tests.e2e.test_swap_faults import same, with_tensors

torch.set_num_threads(1)

pytestmark = pytest.mark.slow

VOCAB = 512
PROMPTS = [[7, 20 + i, 300 - i, 5 * i + 11, *range(40, 40 + 3 * i)] for i in range(6)]
GREEDY = offline.generate(PROMPTS, [{"temperature": 0.0, "max_tokens": 12, "logprobs": 3}] * 6)
LOOK = [GREEDY, offline.rpc("test_drafts"), offline.rpc("test_target_digest")]
"""What a client and the target say, and the drafts verified on the way."""

LENGTHS = [24, 9, 17, 30, 12, 21]
LONG = [
    {"temperature": 0.0 if i % 2 else 1.0, "seed": 5 + i, "max_tokens": length, "logprobs": 0}
    for i, length in enumerate(LENGTHS)
]
SWAPS = (3, 6)
"""Engine steps before which versions 1 and 2 go live: requests are running, waiting and ended then."""


def policies(folder: Path) -> list[Path]:
    """Three policies of one shape, near each other: 0 is served, 1 and 2 come later."""
    folders = [folder / f"policy-{i}" for i in range(3)]
    model = tiny.make_target(folders[0], VOCAB)
    for seed, path in enumerate(folders[1:], start=1):
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in model.parameters():
                noise = torch.randn(parameter.shape, generator=generator)
                parameter += 0.05 * parameter.std() * noise if parameter.ndim == 2 else 0.05 * noise
        model.save_pretrained(path)
    return folders


def logprobs(folder: Path, prompt: list[int], output: list[int]) -> list[float]:
    """What this policy gives each output token behind its true prefix."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    ids = torch.tensor([prompt + output])
    with torch.no_grad():
        every = model(ids).logits[0].log_softmax(-1)
    rows = every[len(prompt) - 1 : -1]
    return rows.gather(1, ids[0, len(prompt) :, None]).flatten().tolist()


def by_token(spans: list[list[int]], length: int) -> list[int]:
    versions = []
    for start, version in spans:
        versions[start:] = [version] * (length - start)
    return versions


def check_versions(folders: list[Path], result: dict) -> list[set[int]]:
    """Each token has the probability that its version gives it; the versions of each request."""
    found = []
    told_apart = 0
    for i, (prompt, output) in enumerate(zip(PROMPTS, result["tokens"], strict=True)):
        assert len(output) == LENGTHS[i]
        versions = by_token(result["versions"][i], len(output))
        under = [logprobs(folder, prompt, output) for folder in folders]
        for at, (token, version) in enumerate(zip(output, versions, strict=True)):
            got = result["logprobs"][i][at][str(token)]
            assert got == pytest.approx(under[version][at], abs=1e-4), (i, at, versions)
            told_apart += abs(got - under[(version + 1) % 3][at]) > 1e-2
        found.append(set(versions))
    assert told_apart > 0.8 * sum(LENGTHS), "the versions must differ for this to say anything"
    return found


@pytest.mark.parametrize("method", ["eagle3", "draft_model"])
def test_each_token_comes_from_its_version_and_a_failed_swap_changes_nothing(method, tmp_path):
    served, second, third = folders = policies(tmp_path)
    target = Target.open(served)
    draft = tmp_path / "draft"
    if method == "eagle3":
        tiny.eagle(target, 1).save(draft)
    else:
        tiny.draft_model(target, layers=4, amount=0.2, seed=1).save(draft)
    name = "model__layers__3__mlp__up_proj__weight"
    weight = load_file(second / "model.safetensors")[name.replace("__", ".")]
    bad = [
        ("not_finite", with_tensors(second, tmp_path / "nan", **{name: weight * torch.nan}), None),
        ("shape", with_tensors(second, tmp_path / "cut", **{name: weight[:-1].contiguous()}), None),
        ("shape", with_tensors(second, tmp_path / "more", extra__weight=weight), None),
        ("tied", with_tensors(second, tmp_path / "tied", lm_head__weight=weight), None),
        ("digest", second, "0" * 64),
        ("unreadable", tmp_path / "nowhere", "0" * 64),
    ]

    job = offline.job(served, draft, method, 3, max_num_seqs=4)
    actions = [offline.rpc("test_shared_modules"), *LOOK]
    for stage in STAGES:
        actions += [offline.rpc("test_fail_policy_at", stage), offline.policy(second, 1), *LOOK]
    for _, folder, digest in bad:
        actions += [offline.policy(folder, 1, digest), *LOOK]
    mixed = dict(zip(SWAPS, [(second, 1), (third, 2)], strict=True))
    actions += [offline.generate(PROMPTS, LONG, policies=mixed), offline.rpc("test_drafts"), *LOOK]
    actions += [offline.policy(served, 3), *LOOK]
    shared, *results = offline.run(job, actions)
    started_with_third = offline.run(offline.job(third, draft, method, 3, max_num_seqs=4), LOOK)

    assert ("embed_tokens" in " ".join(shared)) == (method == "eagle3")
    take = iter(results)
    before = [next(take) for _ in LOOK]
    assert any(before[1]), "something must be drafted"
    for stage in STAGES:
        next(take)
        report = next(take)
        assert report["error"], stage
        expected = {"check": "injected", "silently wrong": "read_back"}.get(stage, "reload")
        assert report["reason"] == expected
        same(before, [next(take) for _ in LOOK])
    for reason, *_ in bad:
        report = next(take)
        assert report["reason"] == reason, report
        same(before, [next(take) for _ in LOOK])

    result = next(take)
    assert [report["error"] for report in result["swaps"]] == [None, None]
    assert [report["live_version"] for report in result["swaps"]] == [1, 2]
    found = check_versions(folders, result)
    assert {0, 1, 2} in found, "some request must live through both swaps"
    assert {2} in found, "some request must have waited until the last version"
    assert any(next(take)), "something must be drafted"
    # What was swapped in is no other than what is there from the start; the drafter is the same one.
    same(started_with_third, [next(take) for _ in LOOK])
    assert next(take)["error"] is None
    same(before, [next(take) for _ in LOOK])


def test_biases_and_a_head_of_its_own_are_exchanged_too(tmp_path):
    """Qwen2's q, k and v have biases, which the engine keeps as one."""
    config = Qwen2Config(
        vocab_size=VOCAB, hidden_size=64, intermediate_size=128, num_hidden_layers=4,
        num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=1024,
        tie_word_embeddings=False, eos_token_id=0, bos_token_id=1,
    )  # fmt: skip
    folders = []
    for seed in range(2):
        torch.manual_seed(seed)
        model = Qwen2ForCausalLM(config)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.normal_(0.0, 0.2)
        folders.append(tmp_path / f"policy-{seed}")
        model.save_pretrained(folders[-1])
    first, second = folders
    assert "model.layers.0.self_attn.q_proj.bias" in load_file(first / "model.safetensors")
    swapped = offline.run(
        offline.job(first, None, "none", 0),
        [GREEDY, offline.policy(second, 1), GREEDY, offline.policy(first, 2), GREEDY],
    )
    (started,) = offline.run(offline.job(second, None, "none", 0), [GREEDY])
    assert [swapped[1]["error"], swapped[3]["error"]] == [None, None]
    for key in ("tokens", "logprobs"):
        assert swapped[2][key] == started[key]
        assert swapped[4][key] == swapped[0][key]
        assert swapped[2][key] != swapped[0][key]
