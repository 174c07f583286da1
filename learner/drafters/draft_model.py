"""A small causal language model with the target's vocabulary, drafting by itself.

Its embedding and head stay frozen: when it is cut out of the target they are the target's own.
"""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar, Self

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache, PreTrainedModel

from learner.batch import SpanBatch
from learner.drafters.base import Drafter, Exported, read_folder
from learner.target import Target, choose_vocab, prior_counts


class DraftModel(Drafter):
    method: ClassVar[str] = "draft_model"
    reads_own_states: ClassVar[bool] = False
    head_rows: Tensor

    def __init__(self, model: PreTrainedModel, vocab: Tensor) -> None:
        """``vocab`` [V_draft] are the tokens that training compares; it drafts from all of them."""
        super().__init__()
        self.aux_count = 0
        self.model = model
        self.head = model.get_output_embeddings()
        for module in (model.get_input_embeddings(), self.head):
            module.requires_grad_(False)
        self.register_buffer("vocab", vocab, persistent=False)
        self.register_buffer("head_rows", self.head.weight[vocab], persistent=False)

    @classmethod
    def build(
        cls,
        target: Target,
        vocab_size: int = 4096,
        counts: Tensor | None = None,
        layers: int = 4,
    ) -> Self:
        """The target's first ``layers`` layers between its own embedding, final norm and head."""
        config = AutoConfig.from_pretrained(target.folder)
        config.num_hidden_layers = layers
        if config.to_dict().get("layer_types") is not None:
            config.layer_types = config.layer_types[:layers]
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
        parameters = dict(model.named_parameters())
        with torch.no_grad():
            for name, parameter in parameters.items():
                parameter.copy_(target.tensor(name))
        return cls(model, _training_vocab(target, vocab_size, counts))

    def retarget(self, target: Target) -> None:
        """Nothing is shared: its embedding and head are copies."""

    def unroll(self, batch: SpanBatch, steps: int, *, own_tokens: bool = False) -> list[Tensor]:
        if own_tokens:
            return self._unroll_own(batch, steps)
        columns = torch.arange(batch.token_ids.shape[1])
        hidden = self.model.base_model(
            input_ids=batch.token_ids,
            position_ids=batch.positions[:, None] + columns,
            use_cache=False,
        ).last_hidden_state
        last = batch.token_ids.shape[1] - 1
        return [
            hidden[batch.anchor_span, (batch.anchor_row + 1 + step).clamp(max=last)]
            for step in range(steps)
        ]

    def _unroll_own(self, batch: SpanBatch, steps: int) -> list[Tensor]:
        """Every anchor branches off the committed tokens with proposals of its own: first the
        tokens are read into a cache, then each step reads one token for every branch."""
        parts: list[list[Tensor]] = []
        for b, (_, row, count) in enumerate(batch.anchor_ranges()):
            if count == 0:
                continue
            tokens = batch.token_ids[b, : row + count + 1]
            read = len(tokens)
            first = int(batch.positions[b])
            cache = DynamicCache(config=self.model.config)
            hidden = self.model.base_model(
                input_ids=tokens[None],
                position_ids=first + torch.arange(read)[None],
                past_key_values=cache,
            ).last_hidden_state[0]
            branch = torch.arange(count)
            seen = torch.arange(read) <= row + 1 + branch[:, None]
            outputs = [hidden[row + 1 + branch]]
            for step in range(1, steps):
                seen = torch.cat([seen, torch.eye(count, dtype=torch.bool)], dim=1)
                mask = torch.zeros(seen.shape).masked_fill(~seen, torch.finfo(torch.float32).min)
                outputs.append(
                    self.model.base_model(
                        input_ids=self.propose(outputs[-1])[None],
                        position_ids=(first + row + 1 + step + branch)[None],
                        attention_mask=mask[None, None],
                        past_key_values=cache,
                    ).last_hidden_state[0]
                )
            parts.append(outputs)
        return [torch.cat([outputs[step] for outputs in parts]) for step in range(steps)]

    def logits(self, hidden: Tensor) -> Tensor:
        return hidden @ self.head_rows.T

    def propose(self, hidden: Tensor) -> Tensor:
        return self.head(hidden).argmax(-1)

    def export(self, dtype: torch.dtype = torch.float32) -> Exported:
        # named_parameters leaves out a tied head, as vLLM expects.
        tensors = {k: v.detach().to(dtype) for k, v in self.model.named_parameters()}
        config = self.model.config.to_dict() | {"dtype": str(dtype).removeprefix("torch.")}
        config["architectures"] = [type(self.model).__name__]
        return {k: v.contiguous() for k, v in tensors.items()}, config

    @classmethod
    def load(cls, folder: str | Path, target: Target) -> Self:
        stored, config = read_folder(folder)
        if config["vocab_size"] != target.vocab_size:
            raise ValueError(f"{folder}: vocabulary of {config['vocab_size']} is not the target's")
        model = AutoModelForCausalLM.from_config(
            AutoConfig.from_pretrained(folder), dtype=torch.float32
        ).eval()
        parameters = dict(model.named_parameters())
        with torch.no_grad():
            for name, parameter in parameters.items():
                parameter.copy_(stored[name])
        return cls(model, _training_vocab(target, 4096, None))


def _training_vocab(target: Target, size: int, counts: Tensor | None) -> Tensor:
    prior = prior_counts(target)
    return choose_vocab(prior if counts is None else prior + counts, size)
