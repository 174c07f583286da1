"""Swaps the target's weights, the policy's, inside a running engine: read beside the steps, applied between.

``stage`` starts a thread that reads and checks a checkpoint while steps go on. ``swap`` exchanges the
weights; the caller has paused the scheduler and cleared its caches (see ``policy_swap``), so every
request is computed again from its first token under the new weights. A drafter that shares the target's
embedding or head shares the modules themselves and has the new ones with them; nothing else of it is
reached from the target.

The last good weights stay in host memory, and not on the device, which they would fill a second time, and
not on disk, where whoever wrote them may have removed or rewritten them since. They are first read when
the first policy comes, so that a server whose target never moves does not hold them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from vllm.config import VllmConfig

from rlcore.engine.readback import engine_name
from rlcore.engine.slot import SwapReport, Weights, WeightSlot
from rlcore.engine.staging import StagedSlot
from rlcore.weights import WEIGHTS, WeightError, check_shapes, read_checked

HEAD = "lm_head.weight"
EMBEDDING = "model.embed_tokens.weight"

COMPUTED = "rotary_emb.inv_freq"
"""Old checkpoints bring it; it follows from the configuration."""


class PolicySlot(StagedSlot[Weights], WeightSlot):
    """Holds a policy whose versions are whole checkpoints."""

    kind = "policy"

    def __init__(self, target: Any, config: VllmConfig, version: int) -> None:
        super().__init__(target, config.model_config, config, version)
        self._good: Weights | None = None

    def make_live(self, checked: Weights, version: int) -> SwapReport:
        assert self._good is not None
        report = self.exchange(checked, self._good, version)
        if report.error is None:
            self._good = checked
        return report

    def check(self, folder: Path, sha256: str) -> Weights:
        """A checkpoint's weights, fit to be loaded; raises WeightError."""
        if self._config.lora_config is not None:
            # Its layers are wrapped, and layerwise reload does not find them.
            raise WeightError(
                "kind",
                "an engine with LoRA adapters takes no whole checkpoint; start the server without "
                "--enable-lora, or with --policy-lora-rank for versions that are adapters",
            )
        _, tensors = read_checked(folder / WEIGHTS, sha256)
        tensors = self._wanted(tensors)
        if self._good is None:
            self._good = self._served()
        check_shapes(_shapes(tensors), _shapes(self._good.tensors))
        return self.weights(self._as_served(tensors))

    def _served(self) -> Weights:
        """What the engine has loaded at its start."""
        folder = Path(self._model_config.model)
        tensors: dict[str, torch.Tensor] = {}
        try:
            index = folder / f"{WEIGHTS}.index.json"
            names = {WEIGHTS}
            if index.exists():
                names = set(json.loads(index.read_text())["weight_map"].values())
            for name in sorted(names):
                tensors |= load_file(folder / name)
        except (OSError, SafetensorError, ValueError, KeyError) as error:
            raise WeightError(
                "served", f"the served model cannot be read, to go back to it: {error}"
            ) from None
        return self.weights(self._as_served(self._wanted(tensors)))

    def _wanted(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Without what the engine does not load; a tied head that is another one is refused."""
        kept = {name: t for name, t in tensors.items() if not name.endswith(COMPUTED)}
        if self._model_config.hf_config.tie_word_embeddings and HEAD in kept:
            head = kept.pop(HEAD)
            if EMBEDDING not in kept or not torch.equal(head, kept[EMBEDDING]):
                raise WeightError("tied", f"{HEAD} is not {EMBEDDING}, but the model ties them")
        return kept

    def _as_served(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """In the dtypes the engine computes in, so that nothing is converted while it waits."""
        modules: dict[str, Any] = dict(self._model.named_modules())
        served = {}
        for name, tensor in tensors.items():
            path, _, attribute = engine_name(name, modules)[0].rpartition(".")
            served[name] = tensor.to(getattr(modules[path], attribute).dtype)
        return served


def _shapes(tensors: Mapping[str, torch.Tensor]) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in tensors.items()}
