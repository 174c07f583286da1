"""LoRA adapters in the engine, with speculation: each request has its own, the policy's is exchanged
between two steps, and one that cannot be served changes nothing."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from learner.target import Target
from tests.e2e import offline, tiny
from tests.e2e.faulty_worker import ADAPTER_STAGES
from tests.e2e.test_policy_swap import by_token

torch.set_num_threads(1)

pytestmark = pytest.mark.slow

VOCAB = 512
PROMPTS = [[7, 20 + i, 300 - i, 5 * i + 11, *range(40, 40 + 3 * i)] for i in range(4)]
SHARED = [3 + 5 * i % 400 for i in range(150)]
"""Longer than a block of the cache: its beginning is found there by who may find it."""

GREEDY = {"temperature": 0.0, "max_tokens": 12, "logprobs": 1}
LOOK = [offline.generate(PROMPTS, [GREEDY] * 4), offline.rpc("test_drafts")]
LENGTHS = [24, 9, 17, 30]
LONG = [
    {"temperature": 0.0 if i % 2 else 1.0, "seed": 5 + i, "max_tokens": n, "logprobs": 0}
    for i, n in enumerate(LENGTHS)
]


def make_adapter(base: Path, folder: Path, seed: int, rank: int = 4, **more: Any) -> Path:
    """Not a trivial one: peft's own has a B of zeros."""
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    config = {"target_modules": "all-linear", **more}
    adapted = get_peft_model(model, LoraConfig(r=rank, lora_alpha=2 * rank, **config))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_" in name:
                parameter.copy_(0.15 * torch.randn(parameter.shape, generator=generator))
    adapted.save_pretrained(folder)
    return folder


class Oracle:
    """transformers and peft."""

    def __init__(self, base: Path, adapter: Path | None) -> None:
        self._model: Any = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
        if adapter is not None:
            self._model = PeftModel.from_pretrained(self._model, adapter)

    @torch.no_grad()
    def logprobs(self, prompt: list[int], output: list[int]) -> torch.Tensor:
        """[n, V]: of what may follow, at each token of the output."""
        ids = torch.tensor([prompt + output])
        return self._model(ids).logits[0, len(prompt) - 1 : -1].log_softmax(-1)

    def check_greedy(self, prompt: list[int], result: dict, index: int) -> None:
        output = result["tokens"][index]
        every = self.logprobs(prompt, output)
        assert output == every.argmax(-1).tolist()
        for at, token in enumerate(output):
            got = result["logprobs"][index][at][str(token)]
            assert got == pytest.approx(float(every[at, token]), abs=1e-4)


def changed(adapter: Path, folder: Path, change: Any) -> Path:
    """A copy whose tensors are what ``change`` makes of them."""
    shutil.copytree(adapter, folder)
    tensors = load_file(adapter / "adapter_model.safetensors")
    change(tensors)
    save_file(tensors, folder / "adapter_model.safetensors")
    return folder


def with_config(adapter: Path, folder: Path, **values: Any) -> Path:
    shutil.copytree(adapter, folder)
    path = folder / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))
    return folder


def bad_adapters(base: Path, good: Path, folder: Path) -> list[tuple[str, Path, str | None]]:
    name = "base_model.model.model.layers.3.mlp.up_proj.lora_B.weight"

    def spoil(tensors: dict[str, torch.Tensor]) -> None:
        tensors[name] = tensors[name] * torch.nan

    def cut(tensors: dict[str, torch.Tensor]) -> None:
        tensors[name] = tensors[name][:-1].contiguous()

    def halve(tensors: dict[str, torch.Tensor]) -> None:
        del tensors[name]

    head = make_adapter(base, folder / "head", 9, target_modules=["q_proj", "lm_head"])
    return [
        ("not_finite", changed(good, folder / "nan", spoil), None),
        ("shape", changed(good, folder / "cut", cut), None),
        ("shape", changed(good, folder / "half", halve), None),
        ("shape", head, None),
        ("config", make_adapter(base, folder / "wide", 9, rank=16), None),
        ("config", with_config(good, folder / "dora", use_dora=True), None),
        ("digest", good, "0" * 64),
    ]


def test_each_request_has_its_adapter_and_a_policy_that_is_one_is_exchanged_or_left(tmp_path):
    base = tmp_path / "base"
    tiny.make_target(base, VOCAB)
    draft = tmp_path / "draft"
    tiny.eagle(Target.open(base), 1).save(draft)
    first, second, named, other = (
        make_adapter(base, tmp_path / name, seed)
        for seed, name in enumerate(("first", "second", "named", "other"), start=1)
    )
    bad = bad_adapters(base, first, tmp_path)
    mixed = [None, named, other, named]

    actions = [
        *LOOK,
        offline.generate(PROMPTS, [GREEDY] * 4, adapters=mixed),
        offline.rpc("test_adapters"),
        offline.generate([SHARED], [GREEDY]),
        offline.generate([SHARED] * 3, [GREEDY] * 3, adapters=[named, None, other]),
        offline.rpc("test_drafts"),  # those of all that; what follows is compared with ``before``
    ]
    for stage in ADAPTER_STAGES:
        actions += [offline.rpc("test_fail_policy_at", stage), offline.policy(first, 1), *LOOK]
    for _, folder, digest in bad:
        actions += [offline.policy(folder, 1, digest), *LOOK]
    swaps = {3: (first, 1), 6: (second, 2)}
    actions += [offline.generate(PROMPTS, LONG, policies=swaps), *LOOK]
    results = offline.run(offline.job(base, draft, "eagle3", 3, max_num_seqs=4, rank=8), actions)

    plain = Oracle(base, None)
    oracles = {None: plain, named: Oracle(base, named), other: Oracle(base, other)}
    take = iter(results)
    before = [next(take) for _ in LOOK]
    assert any(before[1]), "something must be drafted"
    for i, prompt in enumerate(PROMPTS):
        plain.check_greedy(prompt, before[0], i)
    answer = next(take)
    for i, (prompt, adapter) in enumerate(zip(PROMPTS, mixed, strict=True)):
        oracles[adapter].check_greedy(prompt, answer, i)
    assert answer["tokens"][1:] != before[0]["tokens"][1:], "the adapters must do something"
    counts = next(take)
    assert counts.keys() == {"named", "other"}, "the policy's own is not a named one"
    assert all(steps and emitted >= steps for steps, emitted in counts.values())
    plain.check_greedy(SHARED, next(take), 0)
    answer = next(take)
    for i, adapter in enumerate([named, None, other]):
        oracles[adapter].check_greedy(SHARED, answer, i)

    next(take)
    for stage in ADAPTER_STAGES:
        next(take)
        report = next(take)
        assert report["reason"] == ("read_back" if stage == "silently wrong" else "reload")
        assert report["live_version"] == 0
        same_answers(before, [next(take) for _ in LOOK])
    for reason, *_ in bad:
        report = next(take)
        assert report["reason"] == reason, report
        same_answers(before, [next(take) for _ in LOOK])

    result = next(take)
    assert [report["error"] for report in result["swaps"]] == [None, None]
    by_version = [plain, Oracle(base, first), Oracle(base, second)]
    seen: list[set[int]] = []
    for i, prompt in enumerate(PROMPTS):
        output = result["tokens"][i]
        versions = by_token(result["versions"][i], len(output))
        under = [oracle.logprobs(prompt, output) for oracle in by_version]
        for at, (token, version) in enumerate(zip(output, versions, strict=True)):
            got = result["logprobs"][i][at][str(token)]
            assert got == pytest.approx(float(under[version][at, token]), abs=1e-3), (i, at)
        seen.append(set(versions))
    assert {0, 1, 2} in seen, "some request must live through both swaps"
    after = [next(take) for _ in LOOK]
    for i, prompt in enumerate(PROMPTS):
        by_version[2].check_greedy(prompt, after[0], i)


def same_answers(before: list[Any], after: list[Any]) -> None:
    """Bit for bit, and of the same drafts."""
    (generated, drafts), (generated_after, drafts_after) = before, after
    assert generated_after["tokens"] == generated["tokens"]
    assert generated_after["logprobs"] == generated["logprobs"]
    assert drafts_after == drafts
