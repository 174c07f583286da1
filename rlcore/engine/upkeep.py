"""Keeps an EAGLE-3 drafter's KV cache whole through steps that draft nothing, at almost no cost.

vLLM's own step without drafts runs the whole drafter so that its cache stays in step (``propose`` with
no tokens asked for). In a drafter of one layer the keys and values of a position depend on the
target's hidden states there and on the next token, never on attention, so they can be computed later
and many positions at once. A step without drafts therefore only keeps their inputs. They are written
before the drafter next attends to anything, or when there are enough of them; nothing else ever reads
or writes this layer's cache.

Read against vLLM 0.32.0: ``SpecDecodeBaseProposer.propose`` and ``_last_draft_probs``,
``Eagle3LlamaForCausalLM.combine_hidden_states``, its only decoder layer, and ``do_kv_cache_update`` of
its attention's implementation.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

MOST_ROWS = 256
"""Positions kept at most: a few megabytes, and enough for the layer to run at full speed."""


@dataclass(frozen=True)
class _Kept:
    """Inputs of some positions: each tensor has a row for one."""

    token_ids: torch.Tensor
    """[n]: the token after the position."""
    positions: torch.Tensor
    hidden: torch.Tensor
    """[n, auxiliary width]: raw, so that weights swapped in meanwhile are the ones used."""
    slots: torch.Tensor


def can_defer(proposer: Any) -> bool:
    """Whether this drafter's keys and values can be written without running it."""
    from vllm.model_executor.models.llama_eagle3 import Eagle3LlamaForCausalLM

    model = proposer.model
    if proposer.method != "eagle3" or not isinstance(model, Eagle3LlamaForCausalLM):
        return False
    if len(model.model.layers) != 1 or proposer.needs_extra_input_slots or proposer.uses_mrope:
        return False
    attention = model.model.layers[0].self_attn.attn
    return not attention.attn_backend.forward_includes_kv_cache_update


class DeferredUpkeep:
    """Stands in for ``proposer.propose``."""

    def __init__(self, proposer: Any) -> None:
        self._proposer = proposer
        self._propose = proposer.propose
        self._kept: list[_Kept] = []
        self._rows = 0
        proposer.propose = self

    def __call__(self, *, num_speculative_tokens: int, **inputs: Any) -> torch.Tensor:
        if num_speculative_tokens:
            self.write()
            drafts: torch.Tensor = self._propose(
                num_speculative_tokens=num_speculative_tokens, **inputs
            )
            return drafts
        self._proposer.num_speculative_tokens = 0
        self._proposer._last_draft_probs = None
        self._keep(inputs)
        if self._rows >= MOST_ROWS:
            self.write()
        metadata = inputs["common_attn_metadata"]
        return torch.empty(
            metadata.batch_size(), 0, dtype=torch.int64, device=inputs["target_token_ids"].device
        )

    def _keep(self, inputs: dict[str, Any]) -> None:
        metadata = inputs["common_attn_metadata"]
        last = inputs["token_indices_to_sample"]
        if last is None:
            last = metadata.query_start_loc[1:] - 1
        token_ids = inputs["target_token_ids"].roll(-1)
        token_ids[last] = inputs["next_token_ids"].to(token_ids.dtype)
        count = len(token_ids)
        kept = _Kept(
            token_ids,
            inputs["target_positions"].clone(),
            inputs["target_hidden_states"].clone(),
            metadata.slot_mapping[:count].clone(),
        )
        self._kept.append(kept)
        self._rows += count

    def forget(self) -> None:
        """Nothing kept is of use: every request is computed again from its first token on."""
        self._kept, self._rows = [], 0

    @torch.inference_mode()
    def write(self) -> None:
        """Write the keys and values of everything kept."""
        if not self._kept:
            return
        kept, self._kept, self._rows = self._kept, [], 0
        slots = torch.cat([k.slots for k in kept])
        rows = last_rows(slots)
        self._write(
            torch.cat([k.token_ids for k in kept])[rows],
            torch.cat([k.positions for k in kept])[rows],
            torch.cat([k.hidden for k in kept])[rows],
            slots[rows],
        )

    def _write(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        hidden: torch.Tensor,
        slots: torch.Tensor,
    ) -> None:
        model = self._proposer.model
        layer = model.model.layers[0]
        block = layer.self_attn
        attention = block.attn
        embedded = layer.input_layernorm(model.embed_input_ids(token_ids))
        states, _ = layer._residual_norm(hidden_states=model.combine_hidden_states(hidden))
        qkv, _ = block.qkv_proj(torch.cat([embedded, states], dim=-1))
        queries, keys, values = qkv.split([block.q_size, block.kv_size, block.kv_size], dim=-1)
        _, keys = block.rotary_emb(positions, queries, keys)
        attention.impl.do_kv_cache_update(
            attention,
            keys.view(-1, attention.num_kv_heads, attention.head_size),
            values.view(-1, attention.num_kv_heads, attention.head_size_v),
            attention.kv_cache,
            slots,
        )


def last_rows(slots: torch.Tensor) -> torch.Tensor:
    """Indices of the rows that are the last ones for their slot, ascending.

    A block freed and given to another request in the meantime has two rows for a slot.
    """
    order = torch.arange(len(slots), device=slots.device)
    unique, inverse = torch.unique(slots, return_inverse=True)
    last = torch.zeros(len(unique), dtype=order.dtype, device=slots.device)
    last.scatter_reduce_(0, inverse, order, "amax", include_self=False)
    return last.sort().values
