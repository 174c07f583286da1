"""vLLM's scheduler, asking the speculation control for K in every step. Given as ``scheduler_cls``.

Read against vLLM 0.32.0. ``num_spec_tokens_to_schedule`` of step t's SchedulerOutput is what the
drafter proposes at the end of step t and step t + 1 verifies. ``EngineCore`` calls ``schedule``, the
worker, ``update_from_output`` and ``update_draft_token_ids``, and at once ``schedule`` again while there
are requests. So a step is timed from one ``schedule`` to the next, unless nothing was left to do.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.scheduler import Scheduler

from rlcore.engine.fixes import EngineUnsafe
from rlcore.engine.options import EngineOptions
from rlcore.engine.reporter import Reporter
from rlcore.engine.versioned import VersionedDrafts
from rlcore.records.engine_link import SpeculationReport
from rlcore.speculation.control import DraftControl
from rlcore.speculation.gain import Gain, StepFacts

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.outputs import ModelRunnerOutput


MOSTLY = 0.75
"""Share of the drafts asked for that must be verified for a step to say what so many drafts cost: a
grammar, a length limit or a request's own record may have cut some of them."""


@dataclass
class _Step:
    """The step in progress."""

    started: float
    proposed: int
    """Drafts asked for at its end."""
    decoding: list[str]
    """Requests it decodes."""
    others: int
    """Requests whose prompt it reads."""
    verified: int
    """Drafts of all the requests it decodes."""
    pure: bool
    """Nothing but decoding, and nearly as many drafts are verified as are proposed."""
    tokens: int = 0
    """Emitted for the requests it decodes."""


class PacelineScheduler(Scheduler):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        config = self.vllm_config
        if config.parallel_config.data_parallel_size > 1:
            raise EngineUnsafe("Paceline needs one engine per replica: --data-parallel-size 1")
        options = EngineOptions.from_config(config.additional_config)
        # In a pipeline a step is scheduled before the one before it has ended: nothing can be timed.
        one_stage = config.parallel_config.pipeline_parallel_size == 1
        self._timeable = one_stage
        self._adaptive = options.speculation == "adaptive" and one_stage
        self._fixed = 0 if options.speculation == "off" else self.num_spec_tokens
        self._control = DraftControl(self.num_spec_tokens, options.draft_rates)
        self._draft_version = options.draft_version
        self._step: _Step | None = None
        self._timed: _Step | None = None
        """The step before, if the next one begins when it ends."""
        self._gain = Gain()
        self._drafts_now = 0
        self._reporter = Reporter(options.link_endpoint, self._report)
        self._reporter.start()

    def schedule(self, throttle_prefills: bool = False) -> SchedulerOutput:
        started = time.perf_counter()
        if self._timed is not None:
            timed, self._timed = self._timed, None
            if timed.decoding:
                drafts = timed.proposed if timed.pure else None
                self._control.observe_step(len(timed.decoding), drafts, started - timed.started)
            self._account(timed, started)
        output = super().schedule(throttle_prefills)
        self._step = None
        self._control.finished(output.finished_req_ids)
        if output.total_num_scheduled_tokens:
            self._step = step = self._describe(output, started)
            output.num_spec_tokens_to_schedule = step.proposed
        return output

    def _describe(self, output: SchedulerOutput, started: float) -> _Step:
        drafts = output.scheduled_spec_decode_tokens
        decoding = []
        for request_id, count in output.num_scheduled_tokens.items():
            request = self.requests[request_id]
            before = request.num_computed_tokens - count
            if before >= request.num_prompt_tokens - 1 and count == 1 + len(
                drafts.get(request_id, ())
            ):
                decoding.append(request_id)
        proposed = self.drafts_for(list(output.num_scheduled_tokens))
        verified = sum(len(drafts.get(request_id, ())) for request_id in decoding)
        full = proposed * len(decoding)
        others = len(output.num_scheduled_tokens) - len(decoding)
        pure = not others and MOSTLY * full <= verified <= full
        return _Step(started, proposed, decoding, others, verified, pure)

    def drafts_for(self, requests: Sequence[str]) -> int:
        """Drafts asked for at the end of a step of these requests, which the next one verifies."""
        return self._control.choose(requests) if self._adaptive else self._fixed

    def _account(self, step: _Step, ended: float) -> None:
        if step.decoding:
            self._drafts_now = step.proposed
        if self._timeable:
            facts = StepFacts(
                decoding=len(step.decoding),
                others=step.others,
                proposed=step.proposed,
                verified=step.verified,
                usual=step.pure,
                tokens=step.tokens,
            )
            self._gain.observe(facts, ended - step.started, self._control.cost)

    def _report(self) -> SpeculationReport:
        """Called by the reporter's thread: a count may be a step ahead of another."""
        running, waiting = self.get_request_counts()
        gain = self._gain
        return SpeculationReport(
            scheduler=f"{os.getpid()}",
            drafts_now=self._drafts_now,
            decode_steps=gain.decode_steps,
            drafts=gain.drafts,
            tokens=gain.tokens,
            seconds=gain.seconds,
            plain_seconds=gain.plain_seconds,
            unknown_seconds=gain.unknown_seconds,
            running=running,
            waiting=waiting,
        )

    def shutdown(self) -> None:
        self._reporter.stop()
        super().shutdown()

    def set_pause_state(self, pause_state: PauseState) -> None:
        self._timed = None  # the step before a pause did not last as long as the pause
        super().set_pause_state(pause_state)

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> Any:
        sampled = model_runner_output.sampled_token_ids
        index = model_runner_output.req_id_to_index
        for request_id, drafts in scheduler_output.scheduled_spec_decode_tokens.items():
            if drafts and drafts[0] >= 0 and sampled and (kept := sampled[index[request_id]]):
                self._control.observe_drafts(request_id, len(drafts), len(kept) - 1)
        decoding = [] if self._step is None else self._step.decoding
        requests = [self.requests[r] for r in decoding if r in self.requests]
        before = sum(request.num_output_tokens for request in requests)
        outputs = super().update_from_output(scheduler_output, model_runner_output)
        if self._step is not None:
            self._step.tokens += sum(request.num_output_tokens for request in requests) - before
        return outputs

    def update_draft_token_ids(self, draft_token_ids: VersionedDrafts) -> None:
        step = self._step
        if draft_token_ids.version != self._draft_version:
            self._draft_version = draft_token_ids.version
            self._control.new_drafter(draft_token_ids.rates)
        for request_id, drafts in zip(
            draft_token_ids.req_ids, draft_token_ids.draft_token_ids, strict=True
        ):
            request = self.requests.get(request_id)
            if request is not None:
                # A draft behind the last token that may be emitted is verified in vain.
                room = max(0, request.max_tokens - request.num_output_tokens - 1)
                del drafts[room:]
                if step is not None and self._adaptive:
                    limit = self._control.limit(request_id, len(drafts), len(step.decoding))
                    del drafts[limit:]
        super().update_draft_token_ids(draft_token_ids)
        if step is not None and self.has_unfinished_requests():
            self._timed = step
        elif step is not None:
            self._account(step, time.perf_counter())
