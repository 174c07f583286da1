"""The engine worker: vLLM's own, with capture and the swaps added. Given to vLLM as ``worker_cls``.

Read against vLLM 0.32.0. Overridden: ``load_model``, ``execute_model``, ``sample_tokens``,
``take_draft_token_ids``, ``shutdown``; relied on: the V1 model runner's state (see ``capture``) and its
``drafter``. Everything named ``paceline_*`` is an RPC.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import torch
from vllm.platforms import current_platform

from rlcore.engine import adapter_product, threads
from rlcore.engine.adapters import AdapterSlot, only_linear
from rlcore.engine.capture import Capture
from rlcore.engine.courier import Courier
from rlcore.engine.fixes import EngineUnsafe, apply_fixes, verify_fixes
from rlcore.engine.options import EngineOptions
from rlcore.engine.policy import PolicySlot
from rlcore.engine.staging import StageReport
from rlcore.engine.swap import DraftSlot
from rlcore.engine.upkeep import DeferredUpkeep, can_defer
from rlcore.engine.versioned import VersionedDrafts
from rlcore.records.engine_link import CaptureCounts, EngineReport
from rlcore.weights import WeightError

if TYPE_CHECKING or not current_platform.is_cpu():
    from vllm.v1.worker.gpu_worker import Worker as BaseWorker
else:
    from vllm.v1.worker.cpu_worker import CPUWorker as BaseWorker

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import GrammarOutput, SchedulerOutput

# A filtered or failed plugin must not leave the sampler broken.
apply_fixes()
verify_fixes()


class PacelineWorker(BaseWorker):
    """One engine worker. Rank 0 captures; every rank swaps."""

    slot_class = DraftSlot
    policy_class = PolicySlot
    adapter_class = AdapterSlot

    def load_model(self, *, load_dummy_weights: bool = False) -> None:
        if self.vllm_config.lora_config is not None:
            if current_platform.is_cpu():
                adapter_product.apply()
            only_linear(self.model_runner)
        super().load_model(load_dummy_weights=load_dummy_weights)
        if self.use_v2_model_runner or self.scheduler_config.async_scheduling:
            raise EngineUnsafe("Paceline needs the V1 model runner and synchronous scheduling")
        options = EngineOptions.from_config(self.vllm_config.additional_config)
        speculative = self.vllm_config.speculative_config
        self._policy: PolicySlot | AdapterSlot
        if options.policy_rank:
            self._policy = self.adapter_class(
                self.model_runner, self.vllm_config, options.target_version
            )
        else:
            self._policy = self.policy_class(
                self.model_runner.get_model(), self.vllm_config, options.target_version
            )
        self._slot: DraftSlot | None = None
        self._upkeep: DeferredUpkeep | None = None
        self._rates = options.draft_rates
        self._cores, self._allotted = options.cores, options.allotted
        self._threads = torch.get_num_threads() if self._cores else 0
        """That the model computes with at present; 0 where they are not ours to set."""
        self._drafting = 0
        self._proposed = False
        drafter = None if speculative is None else self.model_runner.get_draft_model()
        if speculative is not None and drafter is not None:
            self._slot = self.slot_class(
                self.model_runner.get_model(), drafter, self.vllm_config, options.draft_version
            )
            if can_defer(self.model_runner.drafter):
                self._upkeep = DeferredUpkeep(self.model_runner.drafter)
            self._note_proposals()
        self._courier: Courier | None = None
        if self.is_driver_worker:
            self._courier = Courier(options, self._engine_report, self._drafted)
            sends_traces = options.trace_endpoint is not None and options.capture_rate > 0
            self._capture = Capture(
                target_version=options.target_version,
                rate=options.capture_rate,
                span_tokens=options.capture_span_tokens,
                emit=self._courier.offer if sends_traces else None,
                drop=self._courier.drop,
            )
            self._courier.start()

    def execute_model(self, scheduler_output: SchedulerOutput) -> Any:
        for slot in (self._slot, self._policy):
            if slot is not None and slot.broken:
                raise EngineUnsafe(slot.broken)
        self._set_threads()
        if scheduler_output.total_num_scheduled_tokens:
            self._drafting = scheduler_output.num_spec_tokens_to_schedule
        if self._courier is not None:
            self._capture.finish(scheduler_output.finished_req_ids)
        if isinstance(self._policy, AdapterSlot):
            self._policy.keep()
        return super().execute_model(scheduler_output)

    def _set_threads(self) -> None:
        """Their number is each thread's own: called in the one that computes."""
        if self._cores and self._courier is not None:
            spared = self._courier.cores_spared
            self._threads = threads.compute_with(threads.share(self._cores, self._allotted, spared))

    def _note_proposals(self) -> None:
        """Near the drafter's length limit vLLM does not ask it and takes tokens 0 for its drafts."""
        propose = self.model_runner.drafter.propose

        def noted(**inputs: Any) -> Any:
            self._proposed = True
            return propose(**inputs)

        self.model_runner.drafter.propose = noted

    def sample_tokens(self, grammar_output: GrammarOutput | None) -> Any:
        self._proposed = False
        if self._courier is None or self.model_runner.execute_model_state is None:
            return super().sample_tokens(grammar_output)
        grammar_ids = frozenset(
            grammar_output.structured_output_request_ids if grammar_output else ()
        )
        view = self._capture.before_sampling(self.model_runner, grammar_ids)
        output = super().sample_tokens(grammar_output)
        self._capture.after_sampling(self.model_runner, view, output, self._live_version)
        return output

    def take_draft_token_ids(self) -> VersionedDrafts | None:
        drafts = super().take_draft_token_ids()
        if drafts is None:
            return None
        token_ids = drafts.draft_token_ids if self._proposed else [[] for _ in drafts.req_ids]
        return VersionedDrafts(drafts.req_ids, token_ids, self._live_version, self._rates)

    def shutdown(self) -> None:
        if self._courier is not None:
            self._courier.stop()
        super().shutdown()

    def paceline_swap(
        self, folder: str, sha256: str, version: int, rates: list[float]
    ) -> dict[str, Any]:
        """Make a version live; the answer is a SwapReport as plain values.

        ``rates``: conditional acceptance by position expected of it, as far as known.
        """
        if self._slot is None:
            raise EngineUnsafe("this engine has no drafter to swap")
        report = self._slot.swap(Path(folder), sha256, version)
        if report.error is None:
            self._rates = rates
        return msgspec.to_builtins(report)

    def paceline_policy_stage(self, folder: str, sha256: str, version: int) -> dict[str, Any]:
        """Begin to read a policy; the answer is a StageReport as plain values."""
        try:
            self._policy.stage(Path(folder), sha256, version)
        except WeightError as error:
            return msgspec.to_builtins(StageReport(version, False, error.reason, str(error)))
        return msgspec.to_builtins(self._policy.staged(version))

    def paceline_policy_staged(self, version: int) -> dict[str, Any]:
        """How far that has come."""
        return msgspec.to_builtins(self._policy.staged(version))

    def paceline_policy_apply(self, version: int) -> dict[str, Any]:
        """Make the policy that was read live; the answer is a SwapReport as plain values.

        The scheduler is paused and its caches are cleared.
        """
        report = self._policy.swap(version)
        if self._upkeep is not None:
            self._upkeep.forget()
        if report.error is None and self._courier is not None:
            self._capture.new_target(version)
        return msgspec.to_builtins(report)

    def paceline_compute_on(self, cores: int) -> int:
        """Compute on so many cores from now on, those to be spared aside; the answer is the threads, 0 where
        they are not ours to set."""
        self._allotted = cores
        self._set_threads()
        return self._threads

    def paceline_stop(self, reason: str) -> None:
        """Compute nothing any more."""
        self._policy.broken = reason

    def paceline_acceptance(self) -> list[dict[str, Any]]:
        """Acceptance by draft version since the start, as plain values; empty on other ranks."""
        counts = self._capture.acceptance.values() if self._courier else ()
        return [msgspec.to_builtins(count) for count in counts]

    def paceline_request_acceptance(self, request_ids: list[str]) -> list[dict[str, Any]]:
        """Acceptance by draft version of these requests, as plain values."""
        return [
            msgspec.to_builtins(c) | {"length": c.length}
            for c in (self._capture.request_acceptance(request_ids) if self._courier else [])
        ]

    def _drafted(self, request_id: str) -> tuple[int, int]:
        return self._capture.request_drafted(request_id)

    @property
    def _live_version(self) -> int:
        return -1 if self._slot is None else self._slot.version

    def _engine_report(self, counts: CaptureCounts) -> EngineReport:
        return EngineReport(
            worker=f"{os.getpid()}",
            live_version=self._live_version,
            speculative_tokens=self._drafting,
            acceptance=list(self._capture.acceptance.values()),
            capture=counts,
            threads=self._threads,
            running=len(self.model_runner.requests),
            tenants=[] if self._courier is None else self._courier.tenants.counts(),
            adapters=self._capture.adapters.counts(),
        )
