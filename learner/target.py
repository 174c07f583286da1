"""What the learner needs of the target model: sizes, embedding, head, single tensors by name."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor


@dataclass(frozen=True)
class Target:
    """A Hugging Face folder of a decoder-only model, read tensor by tensor as float32."""

    folder: Path
    config: dict[str, Any]

    @classmethod
    def open(cls, folder: str | Path) -> Target:
        folder = Path(folder)
        config = json.loads((folder / "config.json").read_text())
        return cls(folder, config.get("text_config", config))

    @cached_property
    def _files(self) -> dict[str, Path]:
        files = {}
        for path in sorted(self.folder.glob("*.safetensors")):
            with safe_open(path, "pt") as tensors:
                files.update(dict.fromkeys(tensors.keys(), path))
        return files

    def has(self, name: str) -> bool:
        return name in self._files

    def tensor(self, name: str) -> Tensor:
        with safe_open(self._files[name], "pt") as tensors:
            return tensors.get_tensor(name).float()

    @property
    def layers(self) -> int:
        return self.config["num_hidden_layers"]

    @property
    def hidden_size(self) -> int:
        return self.config["hidden_size"]

    @property
    def vocab_size(self) -> int:
        return self.config["vocab_size"]

    @property
    def aux_layers(self) -> tuple[int, int, int]:
        """The layers whose inputs an EAGLE-3 drafter reads; vLLM's own default."""
        return (2, self.layers // 2, self.layers - 3)

    @cached_property
    def embedding(self) -> Tensor:
        """[V, H]"""
        return self.tensor("model.embed_tokens.weight")

    @cached_property
    def lm_head(self) -> Tensor:
        """[V, H]; the embedding itself when the two are tied."""
        return self.tensor("lm_head.weight") if self.has("lm_head.weight") else self.embedding

    @cached_property
    def final_norm(self) -> Tensor:
        """[H]"""
        return self.tensor("model.norm.weight")

    def moved(self, embedding: Tensor, final_norm: Tensor, lm_head: Tensor | None = None) -> Target:
        """The same model with other weights, of which these are known; ``lm_head`` None: tied.

        ``tensor`` still reads the folder.
        """
        target = Target(self.folder, self.config)
        vars(target).update(
            embedding=embedding,
            final_norm=final_norm,
            lm_head=embedding if lm_head is None else lm_head,
        )
        return target

    @cached_property
    def special_ids(self) -> list[int]:
        """Ids that end or structure an answer: eos, and the tokenizer's special tokens."""
        ids: set[int] = set()
        for name in ("config.json", "generation_config.json"):
            path = self.folder / name
            if path.exists():
                eos = json.loads(path.read_text()).get("eos_token_id")
                ids.update([eos] if isinstance(eos, int) else eos or [])
        path = self.folder / "tokenizer.json"
        if path.exists():
            ids.update(token["id"] for token in json.loads(path.read_text())["added_tokens"])
        return sorted(i for i in ids if i < self.vocab_size)


def choose_vocab(counts: Tensor, size: int) -> Tensor:
    """The ``size`` target ids with the highest counts [V], ascending; ties go to the lower id."""
    size = min(size, counts.numel())
    order = torch.sort(counts, descending=True, stable=True).indices
    return order[:size].sort().values


def prior_counts(target: Target) -> Tensor:
    """Counts [V] in (0, 1) for when no traffic is known; add real counts to them.

    A BPE tokenizer numbers its merges from the most frequent on, so lower ids are likelier. Special
    tokens come first whatever their number.
    """
    counts = torch.linspace(0.5, 0.0, target.vocab_size, dtype=torch.float64)
    counts[target.special_ids] = 1e12
    return counts
