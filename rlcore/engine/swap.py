"""Swaps the drafter's weights inside a running engine, in one RPC between two steps.

Read against vLLM 0.32.0: the aliasing in ``v1.spec_decode.llm_base_proposer``. The file is checked in
full first; then the modules that the drafter shares with the target are taken out of its tree, so that
nothing below can reach them, and put back when the new weights are in (see ``slot``).
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn
from vllm.config import VllmConfig

from rlcore.engine.fixes import EngineUnsafe
from rlcore.engine.slot import SwapReport, WeightSlot
from rlcore.weights import WEIGHTS, WeightError, check_signature, read_checked


class DraftSlot(WeightSlot):
    """The place in the engine that holds the drafter."""

    kind = "drafter"

    def __init__(self, target: nn.Module, drafter: Any, config: VllmConfig, version: int):
        speculative = config.speculative_config
        assert speculative is not None
        super().__init__(drafter, speculative.draft_model_config, config, version)
        self._target = target
        path = Path(self._model_config.model) / WEIGHTS
        self._signature, tensors = _read_unchecked(path)
        # vLLM makes a head that equals the target's the target's own: that is not the drafter's to load.
        own = {name: tensor for name, tensor in tensors.items() if not self._is_shared(name)}
        self._good = self.weights(own)
        self._refuse_shared_parameters()

    def swap(self, folder: Path, sha256: str, version: int) -> SwapReport:
        """Make ``folder`` the live drafter, or leave everything as it was."""
        started = time.perf_counter()
        try:
            new = self.weights(self.check(folder / WEIGHTS, sha256))
        except WeightError as error:
            return self.report(version, started, error.reason, str(error))
        report = self.exchange(new, self._good, version)
        if report.error is None:
            self._good = new
        return report

    def check(self, path: Path, sha256: str) -> dict[str, torch.Tensor]:
        """The file's tensors, fit to be loaded; raises WeightError."""
        names, tensors = read_checked(path, sha256)
        for name in names:
            if self._is_shared(name):
                raise WeightError("aliased", f"{name} would overwrite the target's own weights")
        check_signature(names, self._signature)
        return tensors

    def _is_shared(self, name: str) -> bool:
        """Whether a tensor of the drafter's file belongs to a module of the target."""
        shared = tuple(f"{path.removeprefix('model.')}." for path, _, _ in self._shared_modules())
        return name.removeprefix("model.").startswith(shared)

    def _shared_modules(self) -> list[tuple[str, nn.Module, str]]:
        """(path, parent, attribute) of each drafter module that is also one of the target's."""
        of_target = {id(module) for module in self._target.modules()}
        return [
            (f"{path}.{name}".lstrip("."), parent, name)
            for path, parent in self._model.named_modules()
            if id(parent) not in of_target
            for name, child in parent.named_children()
            if id(child) in of_target
        ]

    @contextmanager
    def _isolated(self) -> Iterator[None]:
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
        with self._isolated():
            for name, parameter in self._model.named_parameters():
                if id(parameter) in of_target:
                    raise EngineUnsafe(f"the drafter's {name} is the target's own parameter")


def _read_unchecked(path: Path):
    """The weights the engine has just loaded from this very file."""
    import hashlib

    return read_checked(path, hashlib.sha256(path.read_bytes()).hexdigest())
