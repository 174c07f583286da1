"""The EAGLE-3 head, as vLLM 0.32 runs it (model_executor/models/llama_eagle3.py).

One Llama layer over the pair (target features of row t, embedding of token t+1), at RoPE position
t. The features are ``fc`` of three auxiliary states; a later draft step reads the head's own output
before the final norm in their place.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from learner.batch import SpanBatch
from learner.drafters.attention import SpanRange, attend
from learner.drafters.base import Drafter, Exported
from learner.drafters.eagle3_folder import aux_count, read_head
from learner.target import Target, choose_vocab, prior_counts

_LAYER_KEYS = (
    "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim",
    "rms_norm_eps", "max_position_embeddings", "vocab_size", "rope_parameters", "rope_scaling",
    "rope_theta", "bos_token_id", "eos_token_id",
)  # fmt: skip


class Attention(nn.Module):
    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        self.kv_heads = config.num_key_value_heads
        self.groups = config.num_attention_heads // self.kv_heads
        hidden, queries = config.hidden_size, config.num_attention_heads * self.head_dim
        self.q_proj = nn.Linear(2 * hidden, queries, bias=False)
        self.k_proj = nn.Linear(2 * hidden, self.kv_heads * self.head_dim, bias=False)
        self.v_proj = nn.Linear(2 * hidden, self.kv_heads * self.head_dim, bias=False)
        self.o_proj = nn.Linear(queries, hidden, bias=False)


class MLP(nn.Module):
    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class MidLayer(nn.Module):
    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.self_attn = Attention(config)
        self.mlp = MLP(config)
        self.hidden_norm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.input_layernorm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)


class Eagle3(Drafter):
    method: ClassVar[str] = "eagle3"
    reads_own_states: ClassVar[bool] = True
    embedding: Tensor

    def __init__(self, config: dict[str, Any], vocab: Tensor, embedding: Tensor) -> None:
        """``config`` as exported; ``vocab`` [V_draft]; ``embedding`` [V, H], the target's own."""
        super().__init__()
        self.config = config
        layer = LlamaConfig(**{k: config[k] for k in _LAYER_KEYS if config.get(k) is not None})
        self.aux_count = aux_count(config)
        self.norm_before_residual = bool(config.get("norm_before_residual", False))
        self.midlayer = MidLayer(layer)
        self.fc = nn.Linear(self.aux_count * layer.hidden_size, layer.hidden_size, bias=False)
        self.norm = nn.RMSNorm(layer.hidden_size, layer.rms_norm_eps)
        self.lm_head = nn.Linear(layer.hidden_size, len(vocab), bias=False)
        self.rotary = LlamaRotaryEmbedding(layer)
        self.register_buffer("vocab", vocab, persistent=False)
        self.register_buffer("embedding", embedding, persistent=False)

    @classmethod
    def build(
        cls, target: Target, vocab_size: int = 4096, counts: Tensor | None = None, seed: int = 0
    ) -> Self:
        """An untrained head. ``counts`` [V] of traffic, if known, choose its vocabulary.

        Raises ValueError for a target so shallow that two of the three depths read are the same.
        """
        if len(set(target.aux_layers)) < len(target.aux_layers):
            raise ValueError(
                f"a target of {target.layers} layers is too shallow for EAGLE-3; "
                "use --draft-method draft_model"
            )
        prior = prior_counts(target)
        vocab = choose_vocab(prior if counts is None else prior + counts, vocab_size)
        config = {k: target.config[k] for k in _LAYER_KEYS if target.config.get(k) is not None}
        config |= {
            "architectures": ["LlamaForCausalLMEagle3"],
            "model_type": "llama",
            "hidden_act": "silu",
            "num_hidden_layers": 1,
            "draft_vocab_size": len(vocab),
            "tie_word_embeddings": False,
            "eagle_config": {
                "use_aux_hidden_state": True,
                "eagle_aux_hidden_state_layer_ids": list(target.aux_layers),
            },
        }
        head = cls(config, vocab, target.embedding)
        head._start(target, seed)
        return head

    def retarget(self, target: Target) -> None:
        self.embedding = target.embedding

    @torch.no_grad()
    def _start(self, target: Target, seed: int) -> None:
        """At first the layer is the target's last one: its features pass to the target's head.

        Weights for the token embedding's half of the attention input have no counterpart there and
        are random, as is everything when the target's last layer has other names or shapes.
        """
        hidden = target.hidden_size
        generator = torch.Generator().manual_seed(seed)
        prefix = f"model.layers.{target.layers - 1}."
        # What the target norms before attention is what the head norms as hidden states.
        theirs = {"hidden_norm.weight": "input_layernorm.weight", "input_layernorm.weight": None}
        for name, weight in self.midlayer.named_parameters():
            if weight.ndim == 2:
                writes_residual = name.endswith(("o_proj.weight", "down_proj.weight"))
                scale = 0.1 if writes_residual else 1.0
                weight.normal_(0.0, scale * weight.shape[1] ** -0.5, generator=generator)
            source = theirs.get(name, name)
            if source is None or not target.has(prefix + source):
                continue
            given = target.tensor(prefix + source)
            reads_pair = name.endswith(("q_proj.weight", "k_proj.weight", "v_proj.weight"))
            half = weight[:, hidden:] if reads_pair else weight
            if given.shape == half.shape:
                half.copy_(given)
        self.fc.weight.zero_()
        self.fc.weight[:, -hidden:].fill_diagonal_(1.0)
        self.lm_head.weight.copy_(target.lm_head[self.vocab])
        self.norm.weight.copy_(target.final_norm)

    def unroll(self, batch: SpanBatch, steps: int, *, own_tokens: bool = False) -> list[Tensor]:
        if batch.aux is None:
            raise ValueError("an EAGLE-3 head needs the auxiliary states")
        attention = self.midlayer.self_attn
        # Rows that an anchor can read, of all spans one after another: no padding is computed.
        read = batch.lengths - 1
        real = torch.arange(batch.aux.shape[1]) < read.unsqueeze(1)
        starts = read.cumsum(0) - read
        # Under autocast the matrices run in bfloat16; the residual stream stays float32.
        features = self.fc(batch.aux[real]).float()
        pair, residual = self._pair(batch.token_ids[:, 1:][real], features)
        rows = torch.arange(batch.aux.shape[1])
        cos, sin = self._angles((batch.positions.unsqueeze(1) + rows)[real])
        keys = _rotate(_heads(attention.k_proj(pair), attention.head_dim), cos, sin)
        values = _heads(attention.v_proj(pair), attention.head_dim)
        spans = [
            SpanRange(anchor, count, start, first)
            for start, (anchor, first, count) in zip(
                starts.tolist(), batch.anchor_ranges(), strict=True
            )
        ]

        # Rows before an anchor give keys and values only; all else is computed for anchors.
        at = starts[batch.anchor_span] + batch.anchor_row
        pair, residual = pair[at], residual[at]
        position = batch.positions[batch.anchor_span] + batch.anchor_row
        own: list[tuple[Tensor, Tensor]] = []
        outputs: list[Tensor] = []
        for step in range(steps):
            cos, sin = self._angles(position + step)
            query = _rotate(_heads(attention.q_proj(pair), attention.head_dim), cos, sin)
            if step > 0:
                key = _rotate(_heads(attention.k_proj(pair), attention.head_dim), cos, sin)
                own.append((key, _heads(attention.v_proj(pair), attention.head_dim)))
            mixed = attend(query, keys, values, own, spans)
            residual = residual + attention.o_proj(mixed)
            normed = self.midlayer.post_attention_layernorm(residual)
            residual = residual + self.midlayer.mlp(normed)
            outputs.append(self.norm(residual))
            if step + 1 < steps:
                committed = batch.tokens_after(2 + step)
                token = self.propose(outputs[-1]) if own_tokens else committed
                pair, residual = self._pair(token, residual)
        return outputs

    def _pair(self, tokens: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """The layer's input [..., 2H], and the residual [..., H]."""
        embeds = self.midlayer.input_layernorm(F.embedding(tokens, self.embedding))
        normed = self.midlayer.hidden_norm(hidden)
        pair = torch.cat([embeds.to(normed.dtype), normed], dim=-1)
        return pair, normed if self.norm_before_residual else hidden

    def _angles(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin [..., 1, head_dim] float32 at absolute positions [...]."""
        flat = positions.reshape(1, -1)
        cos, sin = self.rotary(self.norm.weight, flat)
        shape = (*positions.shape, 1, cos.shape[-1])
        return cos.view(shape), sin.view(shape)

    def logits(self, hidden: Tensor) -> Tensor:
        # argmax and softmax are several times faster in float32 than in bfloat16 on a CPU.
        return self.lm_head(hidden).float()

    def export(self, dtype: torch.dtype = torch.float32) -> Exported:
        tensors = {k: v.detach().to(dtype).contiguous() for k, v in self.named_parameters()}
        vocab_size = self.embedding.shape[0]
        # vLLM has no place for a map when the head covers the whole vocabulary.
        if len(self.vocab) < vocab_size:
            tensors["d2t"] = self.vocab - torch.arange(len(self.vocab))
            tensors["t2d"] = torch.zeros(vocab_size, dtype=torch.bool)
            tensors["t2d"][self.vocab] = True
        return tensors, self.config | {"dtype": str(dtype).removeprefix("torch.")}

    @classmethod
    def load(cls, folder: str | Path, target: Target) -> Self:
        """Also reads heads made elsewhere; raises ValueError on one that cannot be trained here."""
        tensors, config, vocab = read_head(folder, target)
        head = cls(config, vocab, target.embedding)
        head.load_state_dict(tensors)
        return head


def _heads(x: Tensor, head_dim: int) -> Tensor:
    return x.unflatten(-1, (-1, head_dim))


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Neox-style rotary embedding of x [..., heads, d]."""
    left, right = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-right, left], dim=-1) * sin
