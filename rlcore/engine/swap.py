"""Swaps the drafter's weights inside a running engine, in one RPC between two steps.

Read against vLLM 0.32.0: ``model_executor.model_loader.reload`` (layerwise reload) and the aliasing in
``v1.spec_decode.llm_base_proposer``. The stages are: check the file in full; take the modules that the
drafter shares with the target out of its tree, so that nothing below can reach them; reload layer by
layer; put the shared modules back; read the weights back. Layerwise reload keeps modules on the meta
device until it is finalised, so when any stage behind the check fails, the last good weights are
loaded again in the same call.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import nn
from vllm.config import VllmConfig, set_current_vllm_config
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
from rlcore.engine.readback import read_back
from rlcore.weights import WEIGHTS, WeightError, check_signature, read_checked


class SwapReport(msgspec.Struct, frozen=True):
    """What a swap did. ``error`` is set when the old drafter is still serving."""

    version: int
    live_version: int
    seconds: float
    """Time the engine stood still."""
    reason: str | None = None
    """Short word for the failed stage, used as a metric label."""
    error: str | None = None


class DraftSlot:
    """The place in the engine that holds the drafter."""

    def __init__(self, target: nn.Module, drafter: Any, config: VllmConfig, version: int):
        speculative = config.speculative_config
        assert speculative is not None
        self._target = target
        self._drafter = drafter
        self._config = config
        self._draft_config = speculative.draft_model_config
        self.version = version
        self.broken: str | None = None
        """Why the drafter cannot be used any more; the engine must stop."""
        path = Path(self._draft_config.model) / WEIGHTS
        self._signature, self._good = _read_unchecked(path)
        self._refuse_shared_parameters()

    def swap(self, folder: Path, sha256: str, version: int) -> SwapReport:
        """Make ``folder`` the live drafter, or leave everything as it was."""
        started = time.perf_counter()
        try:
            tensors = self.check(folder / WEIGHTS, sha256)
        except WeightError as error:
            return self._report(version, started, error.reason, str(error))
        try:
            self.apply(tensors)
        except Exception as error:
            self._restore()
            reason = error.reason if isinstance(error, WeightError) else "reload"
            return self._report(version, started, reason, f"{type(error).__name__}: {error}")
        self._good = tensors
        self.version = version
        return self._report(version, started, None, None)

    def check(self, path: Path, sha256: str) -> dict[str, torch.Tensor]:
        """The file's tensors, fit to be loaded; raises WeightError."""
        names, tensors = read_checked(path, sha256)
        shared = tuple(f"{name.removeprefix('model.')}." for name, _, _ in self._shared_modules())
        for name in names:
            if name.removeprefix("model.").startswith(shared):
                raise WeightError("aliased", f"{name} would overwrite the target's own weights")
        check_signature(names, self._signature)
        return tensors

    def apply(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Load and read back. Anything may be raised; the drafter is then unusable."""
        with self._detached(), set_current_vllm_config(self._config), torch.no_grad():
            self.begin()
            self.load(tensors)
            self.finish()
            read_back(self._drafter, tensors, self._config)

    # The stages are methods of their own so that a test can make each of them fail.

    def begin(self) -> None:
        initialize_layerwise_reload(self._drafter)

    def load(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self._drafter.load_weights(iter(tensors.items()))

    def finish(self) -> None:
        finalize_layerwise_reload(self._drafter, self._draft_config)
        if self._draft_config.hf_config.tie_word_embeddings:
            # A tied head keeps its own packed copy on CPU; pack it again from the new embedding.
            head = self._drafter.lm_head
            head.quant_method.process_weights_after_loading(head)

    def _restore(self) -> None:
        try:
            DraftSlot.apply_good(self)
        except Exception as error:
            self.broken = f"the last good drafter could not be restored: {error}"
            raise EngineUnsafe(self.broken) from error

    def apply_good(self) -> None:
        """Load the last good weights by the plain path, past whatever a test has broken."""
        with self._detached(), set_current_vllm_config(self._config), torch.no_grad():
            self._abandon_reload()
            DraftSlot.begin(self)
            DraftSlot.load(self, self._good)
            DraftSlot.finish(self)
            read_back(self._drafter, self._good, self._config)

    def _abandon_reload(self) -> None:
        """Take every layer out of an unfinished reload, the weights it has buffered with it: a new
        one would skip the layer and count those weights as its own."""
        for layer in self._drafter.modules():
            info = get_layerwise_info(layer)
            if info.can_load():
                if info.kernel_tensors is not None:
                    _place_kernel_tensors(layer, info)
                info.reset()
        LOADING_LAYERS.clear()

    def _report(
        self, version: int, started: float, reason: str | None, error: str | None
    ) -> SwapReport:
        return SwapReport(
            version=version,
            live_version=self.version,
            seconds=time.perf_counter() - started,
            reason=reason,
            error=error,
        )

    def _shared_modules(self) -> list[tuple[str, nn.Module, str]]:
        """(path, parent, attribute) of each drafter module that is also one of the target's."""
        of_target = {id(module) for module in self._target.modules()}
        return [
            (f"{path}.{name}".lstrip("."), parent, name)
            for path, parent in self._drafter.named_modules()
            if id(parent) not in of_target
            for name, child in parent.named_children()
            if id(child) in of_target
        ]

    @contextmanager
    def _detached(self) -> Iterator[None]:
        """Within it, no module of the target can be reached through the drafter."""
        shared = [
            (parent, name, parent._modules[name]) for _, parent, name in self._shared_modules()
        ]
        for parent, name, _ in shared:
            del parent._modules[name]
        try:
            yield
        finally:
            for parent, name, module in shared:
                parent._modules[name] = module

    def _refuse_shared_parameters(self) -> None:
        of_target = {id(parameter) for parameter in self._target.parameters()}
        with self._detached():
            for name, parameter in self._drafter.named_parameters():
                if id(parameter) in of_target:
                    raise EngineUnsafe(f"the drafter's {name} is the target's own parameter")


def _read_unchecked(path: Path):
    """The weights the engine has just loaded from this very file."""
    import hashlib

    return read_checked(path, hashlib.sha256(path.read_bytes()).hexdigest())
