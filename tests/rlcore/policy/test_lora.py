"""Only an adapter is trained, it is peft's own, and what it adds is what peft says it adds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from rlcore.policy.lora import (
    Lora,
    LoraError,
    adapter_config,
    adapter_weights,
    linear_layers,
    merged_weights,
)
from rlcore.policy.model import load_policy, sampled_logprobs
from rlcore.policy.packing import WeightedRollout, pack
from tests.rlcore.rl.made import a_rollout

torch.set_num_threads(1)

LORA = Lora(rank=4, alpha=6.0, targets=("q_proj", "up_proj", "down_proj"))
IDS = torch.tensor([[5, 9, 17, 3, 44, 2, 8]])


@pytest.fixture
def base(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=1, tie_word_embeddings=True,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(tmp_path / "base")
    return tmp_path / "base"


def moved(model: Any) -> Any:
    """As if trained: without it B is zero and every test of what is added would hold."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".lora_B." in name:
                parameter.copy_(0.3 * torch.randn(parameter.shape, generator=generator))
    return model


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(IDS).logits


def test_at_first_the_policy_is_the_base_and_only_factors_are_trained(base):
    model = load_policy(base, lora=LORA)
    assert torch.equal(logits(model), logits(load_policy(base)))
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    assert len(trained) == 2 * 3 * 2
    assert all(".lora_A." in name or ".lora_B." in name for name in trained)


def test_the_random_factors_go_by_the_seed(base):
    def factors(seed: int) -> list[torch.Tensor]:
        return list(adapter_weights(load_policy(base, lora=LORA, seed=seed)).values())

    assert all(torch.equal(a, b) for a, b in zip(factors(3), factors(3), strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(factors(3), factors(4), strict=True))


def test_peft_opens_the_adapter_and_computes_the_same(base, tmp_path):
    model = moved(load_policy(base, lora=LORA))
    folder = tmp_path / "adapter"
    folder.mkdir()
    save_file(adapter_weights(model), folder / "adapter_model.safetensors")
    config = adapter_config(model, LORA, base)
    (folder / "adapter_config.json").write_text(json.dumps(config))
    plain = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    before = logits(plain)
    opened = PeftModel.from_pretrained(plain, folder)
    torch.testing.assert_close(logits(opened), logits(model))
    assert not torch.allclose(logits(model), before, atol=1e-3)


def test_the_merged_weights_are_a_plain_model_that_computes_the_same(base):
    model = moved(load_policy(base, lora=LORA))
    plain = load_policy(base)
    merged = merged_weights(model)
    assert merged.keys() == dict(plain.named_parameters()).keys()
    plain.load_state_dict(merged, strict=False)
    torch.testing.assert_close(logits(plain), logits(model), atol=1e-5, rtol=1e-5)


def test_all_linear_layers_of_the_decoder_are_adapted_by_default_and_the_head_never(base):
    model = load_policy(base, lora=Lora(2, 4.0, ()))
    names = {name.split(".")[-3] for name in adapter_weights(model)}
    assert names == {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}
    assert names == linear_layers(load_policy(base).model)
    with pytest.raises(LoraError, match="no linear layers lm_head"):
        load_policy(base, lora=Lora(2, 4.0, ("q_proj", "lm_head")))


@pytest.mark.parametrize("fast", [False, True])
def test_packed_rows_give_the_factors_the_gradient_of_the_plain_model(base, fast):
    """The shared prompt, the split products and the chunked head, against autograd over whole logits."""
    rollouts = [a_rollout(f"0.{i}", prompt=[5, 9, 17], sampled=[3, 44, 2 + i]) for i in range(3)]
    weighted = [WeightedRollout(r, 1.0 - i, i) for i, r in enumerate(rollouts)]
    model = moved(load_policy(base, fast=fast, lora=LORA))
    (batch,) = pack(weighted, 256, 0)
    got, _ = sampled_logprobs(model, batch, fast=fast)
    (got * batch.advantages).sum().backward()
    grads = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    assert grads.keys() == {n for n, p in model.named_parameters() if p.requires_grad}

    oracle = moved(load_policy(base, lora=LORA))
    total = torch.zeros(())
    for i, rollout in enumerate(rollouts):
        ids = torch.tensor([rollout.token_ids])
        every = oracle(ids).logits[0].log_softmax(-1)
        total = total + (1.0 - i) * every[2:-1].gather(1, ids[0, 3:, None]).sum()
    total.backward()
    tolerance = 0.05 if fast else 1e-4
    for name, parameter in oracle.named_parameters():
        if parameter.grad is not None:
            difference = (grads[name] - parameter.grad).norm() / parameter.grad.norm()
            assert difference < tolerance, name
