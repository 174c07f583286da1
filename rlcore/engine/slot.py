"""A model in the running engine whose weights can be exchanged between two steps, or left as they were.

Read against vLLM 0.32.0: ``model_executor.model_loader.reload`` (layerwise reload). Weights are reloaded
layer by layer and read back. Layerwise reload keeps modules on the meta device until it is finalised, so
when any stage fails, the last good weights are loaded again in the same call.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import msgspec
import torch
from vllm.config import ModelConfig, VllmConfig, set_current_vllm_config
from vllm.model_executor.model_loader.reload import (
    finalize_layerwise_reload,
    initialize_layerwise_reload,
)
from vllm.model_executor.model_loader.reload.layerwise import (
    LOADING_LAYERS,
    _place_kernel_tensors,
    get_layerwise_info,
)

from rlcore.engine.fixes import EngineUnsafe
from rlcore.engine.readback import Expected, expect, read_back
from rlcore.weights import WeightError


class SwapReport(msgspec.Struct, frozen=True):
    """What a swap did. ``error`` is set when the old weights are still serving."""

    version: int
    live_version: int
    seconds: float
    """Time the engine stood still."""
    reason: str | None = None
    """Short word for the failed stage, used as a metric label."""
    error: str | None = None


@dataclass(frozen=True)
class Weights:
    """A checkpoint in host memory, fit to be loaded, and what the engine must hold afterwards."""

    tensors: Mapping[str, torch.Tensor]
    expected: Expected


class Slot:
    """A place in the engine, and the version that is in it."""

    def __init__(self, version: int) -> None:
        self.version = version
        self.broken: str | None = None
        """Why what it holds cannot be used any more; the engine must stop."""

    def report(
        self, version: int, started: float, reason: str | None, error: str | None
    ) -> SwapReport:
        """``started``: as time.perf_counter says it."""
        return SwapReport(
            version=version,
            live_version=self.version,
            seconds=time.perf_counter() - started,
            reason=reason,
            error=error,
        )


class WeightSlot(Slot):
    """The place in the engine that holds one model."""

    kind: str
    """What the model is, for messages."""

    def __init__(
        self, model: Any, model_config: ModelConfig, config: VllmConfig, version: int
    ) -> None:
        super().__init__(version)
        self._model = model
        self._model_config = model_config
        self._config = config

    def weights(self, tensors: Mapping[str, torch.Tensor]) -> Weights:
        """Raises WeightError for a tensor that the engine has no place for."""
        with self._isolated():
            return Weights(tensors, expect(self._model, tensors, self._config))

    def exchange(self, new: Weights, old: Weights, version: int) -> SwapReport:
        """Make ``new`` the live weights, or leave ``old`` live. EngineUnsafe when neither succeeds."""
        started = time.perf_counter()
        try:
            self.apply(new)
        except Exception as error:
            self._restore(old)
            reason = error.reason if isinstance(error, WeightError) else "reload"
            return self.report(version, started, reason, f"{type(error).__name__}: {error}")
        self.version = version
        return self.report(version, started, None, None)

    def apply(self, weights: Weights) -> None:
        """Load and read back. Anything may be raised; the model is then unusable."""
        with self._isolated(), set_current_vllm_config(self._config), torch.no_grad():
            self.begin()
            self.load(weights.tensors)
            self.finish()
            read_back(self._model, weights.expected)

    # The stages are methods of their own so that a test can make each of them fail.

    def begin(self) -> None:
        initialize_layerwise_reload(self._model)

    def load(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self._model.load_weights(iter(tensors.items()))

    def finish(self) -> None:
        finalize_layerwise_reload(self._model, self._model_config)
        if self._model_config.hf_config.tie_word_embeddings:
            # A tied head keeps its own packed copy on CPU; pack it again from the new embedding.
            head = self._model.lm_head
            head.quant_method.process_weights_after_loading(head)

    def _restore(self, good: Weights) -> None:
        """Load the last good weights by the plain path, past whatever a test has broken."""
        try:
            with self._isolated(), set_current_vllm_config(self._config), torch.no_grad():
                self._abandon_reload()
                WeightSlot.begin(self)
                WeightSlot.load(self, good.tensors)
                WeightSlot.finish(self)
                read_back(self._model, good.expected)
        except Exception as error:
            self.broken = f"the last good {self.kind} could not be restored: {error}"
            raise EngineUnsafe(self.broken) from error

    def _abandon_reload(self) -> None:
        """Take every layer out of an unfinished reload, the weights it has buffered with it: a new
        one would skip the layer and count those weights as its own."""
        for layer in self._model.modules():
            info = get_layerwise_info(layer)
            if info.can_load():
                if info.kernel_tensors is not None:
                    _place_kernel_tensors(layer, info)
                info.reset()
        LOADING_LAYERS.clear()

    @contextmanager
    def _isolated(self) -> Iterator[None]:
        """Within it, no module of another model can be reached through this one."""
        yield
