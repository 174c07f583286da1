"""A swap that fails at any stage changes nothing: target, drafts and live version stay (invariant 2),
and nothing that reaches the drafter reaches the target (invariant 5)."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from learner.drafters.eagle3 import Eagle3
from learner.target import Target
from tests.e2e import offline, tiny
from tests.e2e.faulty_worker import STAGES

pytestmark = pytest.mark.slow

VOCAB = 512
PROMPTS = [[7, 20 + i, 300 - i, 5 * i + 11] for i in range(4)]
GREEDY = offline.generate(PROMPTS, [{"temperature": 0.0, "max_tokens": 12, "logprobs": 3}] * 4)
LOOK = [GREEDY, offline.rpc("test_drafts"), offline.rpc("test_target_digest")]
"""What a client and the target say, and the drafts verified on the way."""


@pytest.fixture(scope="module")
def target_folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("target")
    tiny.make_target(folder, VOCAB)
    return folder


def save_drafters(target: Target, folder: Path, method: str) -> list[Path]:
    """Two that draft differently."""
    folders = [folder / "old", folder / "new"]
    for seed, path in enumerate(folders, start=1):
        if method == "eagle3":
            drafter = tiny.eagle(target, seed)
        else:
            drafter = tiny.draft_model(target, layers=4, amount=0.2, seed=seed)
        drafter.save(path)
    return folders


def with_tensors(source: Path, folder: Path, **tensors: torch.Tensor) -> Path:
    """A copy of a drafter with more, or other, tensors."""
    shutil.copytree(source, folder)
    path = folder / "model.safetensors"
    save_file(load_file(path) | {n.replace("__", "."): t for n, t in tensors.items()}, path)
    return folder


def same(before: list, after: list) -> None:
    (generated, drafts, digest), (generated_after, drafts_after, digest_after) = before, after
    assert generated_after["tokens"] == generated["tokens"]
    assert generated_after["logprobs"] == generated["logprobs"]  # bit for bit
    assert digest_after == digest
    assert drafts_after == drafts


@pytest.mark.parametrize("method", ["eagle3", "draft_model"])
def test_a_swap_that_fails_leaves_the_old_drafter_and_the_target_as_they_were(
    method, target_folder, tmp_path
):
    target = Target.open(target_folder)
    old, new = save_drafters(target, tmp_path, method)
    not_finite = load_file(new / "model.safetensors")
    name = next(name for name in not_finite if "up_proj" in name)
    extra = with_tensors(new, tmp_path / "extra", extra__weight=torch.zeros(2))
    nan = {name.replace(".", "__"): not_finite[name] * torch.nan}
    bad = [
        ("shape", extra, None),
        ("not_finite", with_tensors(new, tmp_path / "nan", **nan), None),
        ("digest", new, "0" * 64),
    ]
    if method == "eagle3":
        poison = torch.full_like(target.embedding, 7.0)
        for spelling in ("embed_tokens__weight", "model__embed_tokens__weight"):
            folder = with_tensors(new, tmp_path / spelling, **{spelling: poison})
            bad.append(("aliased", folder, None))
    actions = [*LOOK, offline.rpc("test_acceptance")]
    for stage in STAGES:
        actions += [offline.rpc("test_fail_at", stage), offline.swap(new, 1), *LOOK]
    for _, folder, digest in bad:
        actions += [offline.swap(folder, 1, digest), *LOOK]
    actions += [offline.swap(new, 1), *LOOK, offline.swap(old, 2), *LOOK]
    actions += [offline.rpc("test_acceptance")]
    results = offline.run(offline.job(target_folder, old, method, 3), actions)

    take = iter(results)
    before = [next(take) for _ in LOOK]
    assert any(before[1]), "something must be drafted"
    first_counts = next(take)
    for stage in STAGES:
        next(take)
        report = next(take)
        assert report["error"], stage
        assert report["live_version"] == 0
        assert report["reason"] == {"check": "injected", "silently wrong": "read_back"}.get(
            stage, "reload"
        )
        same(before, [next(take) for _ in LOOK])
    for reason, *_ in bad:
        report = next(take)
        assert report["live_version"] == 0
        assert report["reason"] == reason
        same(before, [next(take) for _ in LOOK])

    good = next(take)
    assert good["error"] is None
    assert good["live_version"] == 1
    swapped = [next(take) for _ in LOOK]
    assert swapped[0]["tokens"] == before[0]["tokens"]
    assert swapped[2] == before[2]
    assert swapped[1] != before[1], "the new drafter must draft otherwise"
    assert next(take)["live_version"] == 2
    same(before, [next(take) for _ in LOOK])
    counts = next(take)
    runs = 1 + len(STAGES) + len(bad)
    assert counts["0"] == [runs * n for n in first_counts["0"]]
    assert counts.keys() == {"0", "1", "2"}


def test_a_head_that_is_the_targets_own_cannot_overwrite_it(target_folder, tmp_path):
    """vLLM makes an lm_head equal to the target's the same module as the target's."""
    target = Target.open(target_folder)
    head = Eagle3.build(target, vocab_size=VOCAB)
    assert torch.equal(head.lm_head.weight, target.lm_head)
    head.save(tmp_path / "old")
    assert "d2t" not in load_file(tmp_path / "old" / "model.safetensors")
    weights = load_file(tmp_path / "old" / "model.safetensors")
    other = with_tensors(
        tmp_path / "old", tmp_path / "other", lm_head__weight=weights["lm_head.weight"] + 1.0
    )
    without = tmp_path / "without"
    shutil.copytree(tmp_path / "old", without)
    del weights["lm_head.weight"]
    save_file(weights, without / "model.safetensors")
    actions = [offline.rpc("test_shared_modules"), *LOOK]
    for folder in (other, tmp_path / "old", without):
        actions += [offline.swap(folder, 1), *LOOK]
    shared, *results = offline.run(
        offline.job(target_folder, tmp_path / "old", "eagle3", 3), actions
    )
    assert "lm_head" in shared, "this test is about a head that vLLM has shared"
    before, take = results[: len(LOOK)], iter(results[len(LOOK) :])
    reasons = []
    for _ in range(3):
        report = next(take)
        assert report["live_version"] == 0
        reasons.append(report["reason"])
        same(before, [next(take) for _ in LOOK])
    assert reasons == ["aliased", "aliased", "shape"]
