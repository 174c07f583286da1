"""LoRA adapters in the running engine: those that serve as named models, and a policy that is one.

Read against vLLM 0.32.0: ``lora.worker_manager`` and ``lora.model_manager`` (a model's linear layers are
wrapped, and each wrapper keeps the matrices of the adapters in use in stacked tensors),
``lora.lora_model.LoRAModel.from_lora_tensors``.

A policy that is an adapter is under one id for good. Every request of the served model has it from
the first one on; the first version, the served model itself, is an adapter of zeros.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.lora.lora_model import LoRAModel
from vllm.lora.peft_helper import PEFTHelper
from vllm.lora.request import LoRARequest

from rlcore.engine.adapter_counts import POLICY_ID
from rlcore.engine.fixes import EngineUnsafe
from rlcore.engine.slot import SwapReport
from rlcore.engine.staging import StagedSlot
from rlcore.weights import ADAPTER_WEIGHTS, WeightError, read_checked

POLICY_ADAPTER = LoRARequest("policy", POLICY_ID, "policy")
"""Its path is never read: the worker has the adapter before a request asks for it."""

Factors = tuple[torch.Tensor, torch.Tensor]
"""A [rank, inputs], and B [outputs, rank] times the scale: what is added to a layer is B A."""


def only_linear(runner: Any) -> None:
    """Have vLLM wrap linear layers only, and refuse adapters of anything else.

    A drafter shares the target's embedding, and traces are judged by its head: with either adapted they
    would be another model's. ``runner``: a model runner before it loads the model.
    """
    load = runner.load_lora_model

    def load_linear(model: Any, *arguments: Any) -> Any:
        for module in model.modules():
            if hasattr(module, "embedding_modules"):
                module.embedding_modules = {}
        return load(model, *arguments)

    runner.load_lora_model = load_linear


@dataclass(frozen=True)
class Adapter:
    """An adapter in host memory, fit to be served."""

    model: LoRAModel
    factors: Mapping[tuple[str, int], Factors]
    """By the engine's layer and the place within it, where several are fused; zero elsewhere."""


class AdapterSlot(StagedSlot[Adapter]):
    """Holds a policy whose versions are adapters of the served model."""

    def __init__(self, runner: Any, config: VllmConfig, version: int) -> None:
        super().__init__(version)
        assert config.lora_config is not None
        self._lora = config.lora_config
        self._manager = runner.lora_manager._adapter_manager
        self._longest = config.model_config.max_model_len
        self._whole = config.parallel_config.tensor_parallel_size == 1
        self._good = Adapter(self._manager.create_dummy_lora(POLICY_ID, 1, {}), {})
        """At first zeros in every layer: vLLM takes no adapter without any."""

    def keep(self) -> None:
        """Have it in place: vLLM drops all adapters after it has warmed up."""
        if POLICY_ID not in self._manager.list_adapters():
            self.put(self._good)

    def check(self, folder: Path, sha256: str) -> Adapter:
        """An adapter as peft saves it; raises WeightError."""
        _, tensors = read_checked(folder / ADAPTER_WEIGHTS, sha256)
        try:
            facts = PEFTHelper.from_local_dir(str(folder), self._longest)
            facts.validate_legal(self._lora)
        except (OSError, ValueError, TypeError) as error:
            raise WeightError("config", f"{folder}: {error}") from None
        try:
            model = LoRAModel.from_lora_tensors(
                POLICY_ID, tensors, facts, device="cpu", dtype=self._lora.lora_dtype
            )
        except (ValueError, RuntimeError) as error:
            raise WeightError("malformed", f"{folder}: {error}") from None
        factors = {}
        for name, layer in model.loras.items():
            if layer.lora_a is None or layer.lora_b is None:
                raise WeightError("shape", f"{name} has one of its two factors only")
            place = self._place(name)
            # vLLM scales its own in place, and they may be what was read.
            layer.lora_b = layer.lora_b * layer.scaling
            layer.scaling = 1.0
            factors[place] = (layer.lora_a, layer.lora_b)
            self._check_shapes(name, place, *factors[place])
        return Adapter(model, factors)

    def _place(self, name: str) -> tuple[str, int]:
        """Where the engine has a layer; raises WeightError when it has none that takes adapters."""
        if name in self._manager.modules:
            return name, 0
        path, _, last = name.rpartition(".")
        for fused, parts in self._manager.packed_modules_mapping.items():
            if last in parts and f"{path}.{fused}" in self._manager.modules:
                return f"{path}.{fused}", parts.index(last)
        raise WeightError(
            "shape", f"{name} is no linear layer of the served model; only those can be adapted"
        )

    def _check_shapes(
        self, name: str, place: tuple[str, int], a: torch.Tensor, b: torch.Tensor
    ) -> None:
        module, at = self._manager.modules[place[0]], place[1]
        inputs, outputs = module.lora_a_stacked[at].shape[-1], module.lora_b_stacked[at].shape[-2]
        fits = (a.shape[-1], b.shape[0]) == (inputs, outputs) or not self._whole
        if a.dim() != 2 or b.dim() != 2 or a.shape[0] != b.shape[1] or not fits:
            raise WeightError(
                "shape",
                f"{name} has factors {tuple(a.shape)} and {tuple(b.shape)} for {inputs} inputs and "
                f"{outputs} outputs",
            )

    def make_live(self, checked: Adapter, version: int) -> SwapReport:
        started = time.perf_counter()
        try:
            self.put(checked)
            self.read_back(checked)
        except Exception as error:
            self._restore()
            reason = error.reason if isinstance(error, WeightError) else "reload"
            return self.report(version, started, reason, f"{type(error).__name__}: {error}")
        self.version, self._good = version, checked
        return self.report(version, started, None, None)

    def put(self, adapter: Adapter) -> None:
        """Exchange the matrices. Anything may be raised; the policy is then unusable."""
        self._manager.remove_adapter(POLICY_ID)
        self._manager.add_adapter(adapter.model)
        self._manager.activate_adapter(POLICY_ID)
        self._manager.pin_adapter(POLICY_ID)

    @torch.no_grad()
    def read_back(self, adapter: Adapter) -> None:
        """Raises WeightError when the engine does not hold exactly this adapter."""
        index = self._manager.lora_index_to_id.index(POLICY_ID)
        if not self._whole:
            return  # each rank has its own part of them
        for name, module in self._manager.modules.items():
            stacked = zip(module.lora_a_stacked, module.lora_b_stacked, strict=True)
            for place, (all_a, all_b) in enumerate(stacked):
                a, b = all_a[index, 0], all_b[index, 0]
                want = adapter.factors.get((name, place))
                if want is None:
                    same = not b.any()
                else:
                    rank = len(want[0])
                    same = (
                        torch.equal(a[:rank], want[0].to(a.device))
                        and torch.equal(b[:, :rank], want[1].to(b.device))
                        and not b[:, rank:].any()
                    )
                if not same:
                    raise WeightError("read_back", f"the engine holds another adapter of {name}")

    def _restore(self) -> None:
        """The last good adapter, past whatever a test has broken."""
        try:
            AdapterSlot.put(self, self._good)
            AdapterSlot.read_back(self, self._good)
        except Exception as error:
            self.broken = f"the last good adapter could not be restored: {error}"
            raise EngineUnsafe(self.broken) from error
