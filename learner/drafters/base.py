"""What a drafter is to the learner: how it is built, unrolled, exported and loaded.

One indexing convention holds for all drafters. Row t of a span holds the target's states after
reading token t; its logits predict token t+1. An *anchor* is a row t such that token t+1 has been
emitted: the engine then drafts from the target's rows <= t and the tokens <= t+1, and

    draft step j (j = 0, 1, ...) proposes token t+2+j, judged by the target's row t+1+j.

Example: the prompt is tokens 0..3, the target has emitted token 4 ("Paris") and nothing was drafted
yet. The anchor is t = 3. Draft step 0 proposes token 5, judged by row 4; step 1 proposes token 6,
judged by row 5. If step 0 is accepted and step 1 is not, the verification emits token 5 (the draft)
and token 6 (the target's own), and the next anchor is t = 5.

A span starts at ``first_position`` (later than 0 after a prefix-cache hit); the drafter sees
nothing before it, but positions stay absolute.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any, ClassVar, Self

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from learner.batch import SpanBatch
from learner.target import Target

Exported = tuple[dict[str, Tensor], dict[str, Any]]
"""Tensors, and the content of config.json."""


class Drafter(nn.Module, ABC):
    """A drafter under training. Parameters are float32; frozen parts are buffers."""

    method: ClassVar[str]
    """The name vLLM loads it by."""
    aux_count: int
    """Layers of the target whose auxiliary hidden states it reads."""
    reads_own_states: ClassVar[bool]
    """Whether a later draft step differs from step 0 of a later anchor. If not, training on step 0
    covers all steps."""

    vocab: Tensor
    """[V_draft] target id of each training index, ascending."""

    @property
    def needs_aux(self) -> bool:
        return self.aux_count > 0

    @classmethod
    @abstractmethod
    def build(cls, target: Target, vocab_size: int = 4096, counts: Tensor | None = None) -> Self:
        """An untrained one. ``counts`` [V] of traffic, if known, choose its vocabulary."""

    @abstractmethod
    def unroll(self, batch: SpanBatch, steps: int, *, own_tokens: bool = False) -> list[Tensor]:
        """The hidden states before the head, [N, H] for each step, one row for each anchor.

        Later steps read the committed tokens. On the accepted path these are the drafter's own, so
        acceptance can be told from them. ``own_tokens`` reads the drafter's own proposals instead,
        which is what the engine does (both agree up to the first rejected proposal).
        """

    @abstractmethod
    def logits(self, hidden: Tensor) -> Tensor:
        """[..., V_draft] over the training vocabulary."""

    def propose(self, hidden: Tensor) -> Tensor:
        """[...] target ids that the engine would draft greedily."""
        return self.vocab[self.logits(hidden).argmax(-1)]

    @abstractmethod
    def retarget(self, target: Target) -> None:
        """The target has new weights: take over what is shared with it."""

    @abstractmethod
    def export(self, dtype: torch.dtype = torch.float32) -> Exported:
        """What vLLM loads, in its layout."""

    @classmethod
    @abstractmethod
    def load(cls, folder: str | Path, target: Target) -> Self:
        """From an exported folder, or from one made elsewhere."""

    def save(self, folder: str | Path, dtype: torch.dtype = torch.float32) -> None:
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        tensors, config = self.export(dtype)
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        (folder / "config.json").write_text(json.dumps(config, indent=2))


def read_folder(folder: str | Path) -> Exported:
    """All safetensors of a folder, and its config.json."""
    folder = Path(folder)
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise FileNotFoundError(f"{folder} holds no safetensors file")
    tensors: dict[str, Tensor] = {}
    for path in files:
        tensors.update(load_file(path))
    return tensors, json.loads((folder / "config.json").read_text())
