"""A worker whose swaps fail where a test asks for it, and that tells which drafts it verified."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from rlcore.engine.adapter_counts import POLICY_ID
from rlcore.engine.adapters import Adapter, AdapterSlot
from rlcore.engine.policy import PolicySlot
from rlcore.engine.slot import SwapReport, Weights, WeightSlot
from rlcore.engine.swap import DraftSlot
from rlcore.engine.worker import PacelineWorker
from rlcore.weights import WeightError

STAGES = ("check", "begin", "load", "half-way", "finish", "read-back", "silently wrong")


ADAPTER_STAGES = ("half-way", "put", "silently wrong")


class InjectedFault(RuntimeError):
    pass


class Faults(WeightSlot):
    """Fails at ``fail_stage`` once; a restore uses the plain stages and is not affected."""

    fail_stage: str | None = None

    def _fail_at(self, stage: str) -> None:
        if self.fail_stage == stage:
            raise InjectedFault(stage)

    def _fail_check(self) -> None:
        if self.fail_stage == "check":
            raise WeightError("injected", "check")

    def begin(self) -> None:
        super().begin()
        self._fail_at("begin")

    def load(self, tensors: Mapping[str, torch.Tensor]) -> None:
        tensors = dict(tensors)
        if self.fail_stage == "half-way":
            # Stop in the middle of the file, with half of a fused layer given.
            cut = next(i for i, name in enumerate(tensors) if "k_proj" in name) + 1
            super().load(dict(list(tensors.items())[:cut]))
            raise InjectedFault("half-way")
        if self.fail_stage == "silently wrong":
            name = next(name for name in tensors if "down_proj" in name)
            tensors[name] = tensors[name].flip(0)
        super().load(tensors)
        self._fail_at("load")

    def finish(self) -> None:
        super().finish()
        self._fail_at("finish")

    def apply(self, *args: Any) -> None:
        super().apply(*args)
        self._fail_at("read-back")


class FaultySlot(Faults, DraftSlot):
    def swap(self, *args: Any) -> SwapReport:
        try:
            return super().swap(*args)
        finally:
            self.fail_stage = None

    def check(self, *args: Any) -> dict[str, torch.Tensor]:
        self._fail_check()
        return super().check(*args)


class FaultyPolicy(Faults, PolicySlot):
    def swap(self, *args: Any) -> SwapReport:
        try:
            return super().swap(*args)
        finally:
            self.fail_stage = None

    def check(self, *args: Any) -> Weights:
        try:
            self._fail_check()
        finally:
            self.fail_stage = None if self.fail_stage == "check" else self.fail_stage
        return super().check(*args)


class FaultyAdapter(AdapterSlot):
    """Fails at ``fail_stage`` once; a restore is not affected."""

    fail_stage: str | None = None

    def make_live(self, *args: Any) -> SwapReport:
        try:
            return super().make_live(*args)
        finally:
            self.fail_stage = None

    def put(self, adapter: Adapter) -> None:
        if self.fail_stage == "half-way":
            self._manager.remove_adapter(POLICY_ID)
            raise InjectedFault("half-way")
        super().put(adapter)
        if self.fail_stage == "put":
            raise InjectedFault("put")
        if self.fail_stage == "silently wrong":
            index = self._manager.lora_index_to_id.index(POLICY_ID)
            layer = next(iter(self._manager.modules.values()))
            layer.lora_b_stacked[0][index] += 1


def digest_of(model: torch.nn.Module) -> float:
    return sum(
        float((p.double() * torch.arange(1, p.numel() + 1).view_as(p).double()).sum())
        for p in model.parameters()
        if p.numel()
    )


class FaultyWorker(PacelineWorker):
    slot_class = FaultySlot
    policy_class = FaultyPolicy
    adapter_class = FaultyAdapter

    def load_model(self, *, load_dummy_weights: bool = False) -> None:
        self._seen: list[list[int]] = []
        super().load_model(load_dummy_weights=load_dummy_weights)

    def test_fail_at(self, stage: str) -> None:
        assert stage in STAGES
        assert isinstance(self._slot, FaultySlot)
        self._slot.fail_stage = stage

    def test_fail_policy_at(self, stage: str) -> None:
        assert stage in STAGES + ADAPTER_STAGES
        assert isinstance(self._policy, (FaultyPolicy, FaultyAdapter))
        self._policy.fail_stage = stage

    def test_acceptance(self) -> dict[int, tuple[int, int]]:
        """By draft version: drafts verified and accepted since the start."""
        return {
            version: (sum(count.drafted), sum(count.accepted))
            for version, count in self._capture.acceptance.items()
        }

    def test_adapters(self) -> dict[str, tuple[int, int]]:
        """By adapter: steps with drafts, and the tokens that they emitted."""
        counts = self._capture.adapters.counts()
        return {one.adapter: (one.total.steps, one.total.emitted) for one in counts}

    def test_drafts(self) -> list[list[int]]:
        """The drafts verified since the last call, step by step."""
        taken, self._seen = self._seen, []
        return taken

    def test_target_digest(self) -> float:
        """Changes when any value of the target's plain parameters does."""
        return digest_of(self.model_runner.get_model())

    def test_shared_modules(self) -> list[str]:
        assert self._slot is not None
        return [name for name, _, _ in self._slot._shared_modules()]

    def execute_model(self, scheduler_output: Any) -> Any:
        self._seen += [
            list(drafts)
            for _, drafts in sorted(scheduler_output.scheduled_spec_decode_tokens.items())
        ]
        return super().execute_model(scheduler_output)
