"""What an adapter must be to be a version of the policy, without an engine (tests/e2e/test_adapters.py has
one)."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM
from vllm.config.lora import LoRAConfig

from rlcore.engine.adapters import AdapterSlot, only_linear
from rlcore.engine.policy import PolicySlot
from rlcore.weights import WeightError

HIDDEN, INNER, KV, MOST_RANK = 16, 24, 8, 8
WIDTHS = {
    "self_attn.qkv_proj": (HIDDEN, (HIDDEN, KV, KV)),
    "self_attn.o_proj": (HIDDEN, (HIDDEN,)),
    "mlp.gate_up_proj": (HIDDEN, (INNER, INNER)),
    "mlp.down_proj": (INNER, (HIDDEN,)),
}


def a_slot() -> AdapterSlot:
    modules = {
        f"model.layers.{layer}.{name}": SimpleNamespace(
            lora_a_stacked=[torch.zeros(1, 1, MOST_RANK, inputs) for _ in outputs],
            lora_b_stacked=[torch.zeros(1, 1, width, MOST_RANK) for width in outputs],
        )
        for layer in range(2)
        for name, (inputs, outputs) in WIDTHS.items()
    }
    manager = SimpleNamespace(
        modules=modules,
        create_dummy_lora=lambda *_: None,
        packed_modules_mapping={
            "qkv_proj": ["q_proj", "k_proj", "v_proj"],
            "gate_up_proj": ["gate_proj", "up_proj"],
        },
    )
    lora = LoRAConfig(max_lora_rank=MOST_RANK, lora_dtype=torch.float32)
    config = SimpleNamespace(
        lora_config=lora,
        model_config=SimpleNamespace(max_model_len=64),
        parallel_config=SimpleNamespace(tensor_parallel_size=1),
    )
    runner = SimpleNamespace(lora_manager=SimpleNamespace(_adapter_manager=manager))
    return AdapterSlot(runner, config, 0)


def saved(folder: Path, rank: int = 4, targets: str | list[str] = "all-linear") -> Path:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=32, hidden_size=HIDDEN, intermediate_size=INNER, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=1, tie_word_embeddings=False,
    )  # fmt: skip
    lora = LoraConfig(r=rank, lora_alpha=6, target_modules=targets, init_lora_weights=False)
    get_peft_model(LlamaForCausalLM(config), lora).save_pretrained(folder)
    return folder


def check(folder: Path):
    content = (folder / "adapter_model.safetensors").read_bytes()
    return a_slot().check(folder, hashlib.sha256(content).hexdigest())


def test_an_adapter_as_peft_saves_it_has_a_place_for_each_factor_and_its_scale(tmp_path):
    folder = saved(tmp_path / "adapter")
    adapter = check(folder)
    assert len(adapter.factors) == 2 * 7
    stored = load_file(folder / "adapter_model.safetensors")
    prefix = "base_model.model.model.layers.1.mlp.up_proj"
    a, b = adapter.factors["model.layers.1.mlp.gate_up_proj", 1]
    assert torch.equal(a, stored[f"{prefix}.lora_A.weight"])
    assert torch.equal(b, stored[f"{prefix}.lora_B.weight"] * 1.5)
    assert all(layer.scaling == 1 for layer in adapter.model.loras.values())


def test_some_layers_are_enough(tmp_path):
    factors = check(saved(tmp_path / "adapter", targets=["v_proj", "o_proj"])).factors
    assert {(name.rpartition(".")[2], place) for name, place in factors} == {
        ("qkv_proj", 2), ("o_proj", 0),
    }  # fmt: skip


@pytest.mark.parametrize("targets", [["q_proj", "lm_head"], ["embed_tokens"]])
def test_what_is_no_linear_layer_of_the_decoder_is_refused(tmp_path, targets):
    with pytest.raises(WeightError) as caught:
        check(saved(tmp_path / "adapter", targets=targets))
    assert caught.value.reason in ("shape", "malformed")


def test_a_rank_above_the_servers_is_refused(tmp_path):
    with pytest.raises(WeightError, match="rank") as caught:
        check(saved(tmp_path / "adapter", rank=16))
    assert caught.value.reason == "config"


@pytest.mark.parametrize("values", [{"use_dora": True}, {"r": "four"}, {"lora_alpha": None}])
def test_what_the_engine_does_not_support_or_is_no_configuration_is_refused(tmp_path, values):
    folder = saved(tmp_path / "adapter")
    path = folder / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))
    with pytest.raises(WeightError) as caught:
        check(folder)
    assert caught.value.reason == "config"


@pytest.mark.parametrize("fault", ["half", "narrow", "nan"])
def test_damaged_factors_are_refused(tmp_path, fault):
    folder = saved(tmp_path / "adapter")
    path = folder / "adapter_model.safetensors"
    tensors = load_file(path)
    name = "base_model.model.model.layers.0.self_attn.k_proj.lora_B.weight"
    if fault == "half":
        del tensors[name]
    elif fault == "narrow":
        tensors[name] = tensors[name][:-1].contiguous()
    else:
        tensors[name][0, 0] = torch.nan
    save_file(tensors, path)
    with pytest.raises(WeightError) as caught:
        check(folder)
    assert caught.value.reason == ("not_finite" if fault == "nan" else "shape")


def test_an_engine_with_adapters_takes_no_whole_checkpoint(tmp_path):
    config = SimpleNamespace(lora_config=object(), model_config=None)
    with pytest.raises(WeightError, match="--policy-lora-rank") as caught:
        PolicySlot(torch.nn.Module(), config, 0).check(tmp_path, "0" * 64)
    assert caught.value.reason == "kind"


def test_only_linear_layers_are_wrapped():
    model = torch.nn.Module()
    model.embedding_modules = {"embed_tokens": "input_embeddings"}
    seen = []
    runner = SimpleNamespace(load_lora_model=lambda m, *_: seen.append(m.embedding_modules))
    only_linear(runner)
    runner.load_lora_model(model, None, None)
    assert seen == [{}]
