"""A tiny random target that the engine can run, and drafters for it."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from learner.drafters.base import Drafter
from learner.drafters.draft_model import DraftModel
from learner.drafters.eagle3 import Eagle3
from learner.target import Target


def make_target(folder: Path, vocab: int = 512, sharpness: float = 2.0) -> LlamaForCausalLM:
    """Writes a float32 Llama of eight layers, tied; larger ``sharpness``, surer predictions."""
    config = LlamaConfig(
        vocab_size=vocab, hidden_size=64, intermediate_size=128, num_hidden_layers=8,
        num_attention_heads=2, num_key_value_heads=1, head_dim=32, max_position_embeddings=1024,
        tie_word_embeddings=True, eos_token_id=0, bos_token_id=1,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
    )  # fmt: skip
    torch.manual_seed(0)
    model = LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 2:
                scale = 0.15 * sharpness if "embed" in name else parameter.shape[1] ** -0.5
                parameter.normal_(0.0, scale)
    model.save_pretrained(folder)
    return model


def disturbed(drafter: Drafter, amount: float, seed: int) -> Drafter:
    """The same drafter with every trained matrix off by a relative ``amount``."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in drafter.parameters():
            if parameter.requires_grad and parameter.ndim == 2:
                noise = torch.randn(parameter.shape, generator=generator)
                parameter += amount * parameter.std() * noise
    return drafter


def eagle(target: Target, seed: int, vocab_size: int = 256) -> Drafter:
    return disturbed(Eagle3.build(target, vocab_size=vocab_size, seed=seed), 0.5, seed)


def draft_model(target: Target, layers: int, amount: float, seed: int) -> Drafter:
    return disturbed(DraftModel.build(target, layers=layers, vocab_size=16), amount, seed)
