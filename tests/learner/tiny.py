"""A tiny random target folder, and spans of a made-up request, for the learner's tests."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from learner.batch import Span
from rlcore.records.trace import Sampling, VerifyStep, VerifyTrace
from rlcore.records.wire import TensorSpec

VOCAB = 96
HIDDEN = 32


def make_target(folder: Path, *, tied: bool = True) -> LlamaForCausalLM:
    """Writes a float32 Llama of eight layers to ``folder`` and returns it."""
    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=HIDDEN, intermediate_size=48, num_hidden_layers=8,
        num_attention_heads=4, num_key_value_heads=2, head_dim=8, max_position_embeddings=256,
        tie_word_embeddings=tied, eos_token_id=90, bos_token_id=1,
        rope_parameters={"rope_type": "default", "rope_theta": 5000.0},
    )  # fmt: skip
    torch.manual_seed(0)
    model = LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(4.0 if parameter.ndim == 2 else 1.0)
    model.save_pretrained(folder)
    (folder / "tokenizer.json").write_text(json.dumps({"added_tokens": [{"id": 91}]}))
    return model


@torch.no_grad()
def make_span(
    model: LlamaForCausalLM, length: int, prompt_length: int, first_position: int = 0, seed: int = 0
) -> Span:
    """``length`` rows of random tokens under the model, as if a prefix before them was cached."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(VOCAB, (first_position + length + 1,), generator=generator)
    output = model.model(tokens[None], output_hidden_states=True)
    states = output.hidden_states
    aux = torch.cat([states[2], states[4], states[5]], dim=-1)[0]
    last = output.last_hidden_state[0]
    lse = torch.logsumexp(model.lm_head(last), dim=-1)
    lse[: prompt_length - 1] = torch.nan
    rows = slice(first_position, first_position + length)
    return Span(
        token_ids=tokens[first_position:],
        aux=aux[rows].clone(),
        last=last[rows].clone(),
        lse=lse[rows].clone(),
        first_position=first_position,
        prompt_length=prompt_length,
        prompt_hash=f"{seed}",
        steps=(),
        sampling=Sampling(),
        tenant="t",
        request_id=f"r{seed}",
    )


def make_trace(span: Span, **fields: Any) -> tuple[VerifyTrace, list[bytes]]:
    """The message that a span would have come in: header and tensor frames, float32."""
    tensors = {"aux": span.aux, "last": span.last, "logsumexp": span.lse}
    found = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    values = {
        "request_id": span.request_id, "tenant": span.tenant, "target_version": 0, "span_index": 0,
        "final": True, "first_position": span.first_position, "prompt_length": span.prompt_length,
        "prompt_hash": span.prompt_hash, "token_ids": span.token_ids.tolist(),
        "sampling": span.sampling, "grammar": False, "steps": list(span.steps),
        "tensors": [TensorSpec(name, "float32", tuple(t.shape)) for name, t in found.items()],
    }  # fmt: skip
    return VerifyTrace(**(values | fields)), [t.numpy().tobytes() for t in found.values()]


def make_steps(span: Span, k: int) -> tuple[VerifyStep, ...]:
    """Steps of ``k`` wrong drafts each, one at every position that can be drafted for."""
    first = span.first_position + span.first_anchor + 2
    ids = span.token_ids.tolist()
    return tuple(
        VerifyStep(position, 0, [(ids[position - span.first_position] + 1) % VOCAB] * k, 0,
                   ids[position - span.first_position])
        for position in range(first, span.first_position + span.rows)
    )  # fmt: skip
