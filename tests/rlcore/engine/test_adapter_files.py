"""An adapter that is named at the start is refused before anything is loaded, in one line."""

from __future__ import annotations

from pathlib import Path

import pytest
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

from rlcore.engine.adapter_files import AdapterError, check_adapter


def saved(folder: Path, **lora) -> Path:
    config = LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=24, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=1, tie_word_embeddings=False,
    )  # fmt: skip
    get_peft_model(LlamaForCausalLM(config), LoraConfig(r=2, **lora)).save_pretrained(folder)
    return folder


def test_an_adapter_of_linear_layers_is_taken(tmp_path):
    check_adapter("french", saved(tmp_path / "a", target_modules="all-linear"))


@pytest.mark.parametrize(
    ("lora", "changed"),
    [
        ({"target_modules": ["q_proj", "lm_head"]}, "lm_head"),
        ({"target_modules": ["embed_tokens"]}, "embed_tokens"),
        ({"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]}, "lm_head"),
        ({"target_modules": ["q_proj"], "use_dora": True}, "lora_magnitude"),
    ],
)
def test_one_of_anything_else_is_refused_and_named(tmp_path, lora, changed):
    with pytest.raises(AdapterError, match=rf"^adapter french: .* changes .*{changed}") as caught:
        check_adapter("french", saved(tmp_path / "a", **lora))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("fault", ["empty", "no weights", "garbage"])
def test_a_folder_that_holds_none_is_refused(tmp_path, fault):
    folder = tmp_path / "a"
    folder.mkdir()
    if fault != "empty":
        (folder / "adapter_config.json").write_text("{}")
    if fault == "garbage":
        (folder / "adapter_model.safetensors").write_bytes(b"no tensors here")
    with pytest.raises(AdapterError, match=r"^adapter french"):
        check_adapter("french", folder)
