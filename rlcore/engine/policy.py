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
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from vllm.config import VllmConfig

from rlcore.engine.readback import engine_name
from rlcore.engine.slot import SwapReport, Weights, WeightSlot
from rlcore.weights import WEIGHTS, WeightError, check_shapes, read_checked

HEAD = "lm_head.weight"
EMBEDDING = "model.embed_tokens.weight"

COMPUTED = "rotary_emb.inv_freq"
"""Old checkpoints bring it; it follows from the configuration."""


class StageReport(msgspec.Struct, frozen=True):
    """How far the reading of a version has come."""

    version: int
    ready: bool = False
    reason: str | None = None
    """Short word for why it cannot be used, a metric label; None while it is read."""
    error: str | None = None


class PolicySlot(WeightSlot):
    """The place in the engine that holds the policy."""

    kind = "policy"

    def __init__(self, target: Any, config: VllmConfig, version: int) -> None:
        super().__init__(target, config.model_config, config, version)
        self._good: Weights | None = None
        self._staging: _Staging | None = None

    def stage(self, folder: Path, sha256: str, version: int) -> None:
        """Begin to read a version; raises WeightError while another one is being read."""
        if self._staging is not None and self._staging.is_alive():
            raise WeightError("busy", f"version {self._staging.version} is still being read")
        self._staging = _Staging(self, folder, sha256, version)
        self._staging.start()

    def staged(self, version: int) -> StageReport:
        staging = self._staging
        if staging is None or staging.version != version:
            return StageReport(version, False, "not_staged", "nobody asked for it to be read")
        if staging.is_alive():
            return StageReport(version)
        if staging.error is not None:
            return StageReport(version, False, staging.error.reason, str(staging.error))
        return StageReport(version, True)

    def swap(self, version: int) -> SwapReport:
        """Make the staged version live, or leave everything as it was."""
        started = time.perf_counter()
        state, staging = self.staged(version), self._staging
        if not state.ready:
            return self.report(version, started, state.reason or "busy", state.error or "unread")
        self._staging = None
        assert staging is not None
        assert staging.weights is not None
        assert self._good is not None
        report = self.exchange(staging.weights, self._good, version)
        if report.error is None:
            self._good = staging.weights
        return report

    def check(self, folder: Path, sha256: str) -> Weights:
        """A checkpoint's weights, fit to be loaded; raises WeightError."""
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


class _Staging(threading.Thread):
    """Reads one version. ``weights`` or ``error`` is set when it has ended."""

    def __init__(self, slot: PolicySlot, folder: Path, sha256: str, version: int) -> None:
        super().__init__(name="paceline-policy", daemon=True)
        self._slot = slot
        self._folder = folder
        self._sha256 = sha256
        self.version = version
        self.weights: Weights | None = None
        self.error: WeightError | None = None

    def run(self) -> None:
        # For this thread alone: helpers would take the cores from the step's own threads.
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            self.weights = self._slot.check(self._folder, self._sha256)
        except WeightError as error:
            self.error = error
        except Exception as error:  # its end is asked for by polling: it must leave word
            self.error = WeightError("stage", f"{type(error).__name__}: {error}")
        finally:
            torch.set_num_threads(threads)  # what threads that start later begin with


def _shapes(tensors: Mapping[str, torch.Tensor]) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in tensors.items()}
