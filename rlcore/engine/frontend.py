"""The engine's front side: vLLM's AsyncLLM, with word of every request's true end.

Read against vLLM 0.32.0: ``AsyncLLM._run_output_handler`` takes ``self.output_processor`` when it
starts, so the processor is exchanged for ours just before. ``OutputProcessor.add_request``,
``_finish_request`` and ``abort_requests`` see each engine-side request id exactly once (children of
``n > 1`` included), whatever ends it: a stop string, a length, an abort. ``EngineCore`` puts its weight
version on every step's output; ``RequestState.weight_version_starts`` says from which output token on
each one sampled. An ``EngineCoreOutput`` is what one step emitted for one request; what a stream's chunk
carries may be several of them.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable
from contextvars import ContextVar
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any

from vllm.exceptions import GracefulHTTPError
from vllm.lora.request import LoRARequest
from vllm.utils import length_from_prompt_token_ids_or_embeds
from vllm.v1.engine import EngineCoreOutput, EngineCoreRequest
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError
from vllm.v1.engine.output_processor import (
    OutputProcessor,
    RequestOutputCollector,
    RequestState,
)
from vllm.v1.engine.parallel_sampling import ParentRequest

from rlcore.engine.isolation import ranked, tenant_salt
from rlcore.engine.shares import Served, ServedCount


@dataclass
class Ticket:
    """One HTTP request's claims on the engine: filled by whichever task submits for it."""

    tenant: str = "default"
    learn: bool = True
    priority: int | None = None
    """The tenant's, lower is sooner; None leaves each request the one that its body names."""
    charge: Callable[[int], None] | None = None
    """Told of tokens, prompt and output, when they are known."""
    came: float = 0.0
    """When the server began to take the request in, monotonic seconds."""
    adapter: str = ""
    """That the request names as its model."""
    engine_ids: list[str] = field(default_factory=list)
    steps: deque[int] | None = None
    """How many tokens each step emitted, if that is asked for: accepted drafts, then one of the target's."""
    _policies: dict[tuple[int, int], list[tuple[int, int]]] = field(default_factory=dict)

    def note_policies(self, state: RequestState) -> None:
        """A choice has ended: keep which policy version sampled which of its tokens."""
        assert state.detokenizer is not None
        emitted = state.detokenizer.num_output_tokens()
        # Several prompts of a completion are numbered by vLLM, at the end of their ids.
        number = state.external_req_id.rpartition("-")[2]
        place = int(number) if number.isdecimal() else 0, state.request_index
        self._policies[place] = [
            (start, int(version))
            for version, start in state.weight_version_starts
            if start < emitted
        ]

    def take_steps(self, tokens: int) -> list[int]:
        """The steps that emitted the next so many tokens; a stop string cuts the last one."""
        taken = []
        while self.steps and tokens > 0:
            taken.append(min(tokens, self.steps.popleft()))
            tokens -= taken[-1]
        return taken

    @property
    def policy_versions(self) -> list[list[tuple[int, int]]]:
        """Of each choice that has ended, in the response's order: (index of the first output token,
        policy version) pairs."""
        return [self._policies[place] for place in sorted(self._policies)]


current_ticket: ContextVar[Ticket | None] = ContextVar("paceline_ticket", default=None)

EndCallback = Callable[[str, int, Ticket], None]
"""(engine request id, output tokens the response returned, ticket)"""


class RequestLedger(OutputProcessor):
    """Reports how many tokens each response really returned."""

    def __init__(
        self, like: OutputProcessor, on_end: EndCallback, policy: LoRARequest | None
    ) -> None:
        """``policy``: the adapter that is the policy, for every request that names no other one."""
        super().__init__(
            like.tokenizer,
            log_stats=like.log_stats,
            stream_interval=like.stream_interval,
            tracing_enabled=like.tracing_enabled,
            admission_stats=like.admission_stats,
        )
        self._on_end = on_end
        self._policy = policy
        self._tickets: dict[str, Ticket] = {}
        self._served = Served()

    def add_request(
        self,
        request: EngineCoreRequest,
        prompt: str | None,
        parent_req: ParentRequest | None = None,
        request_index: int = 0,
        queue: RequestOutputCollector | None = None,
    ) -> None:
        """Whatever the route, a request passes here just before the engine is given it, so this is
        where its tenant's marks are put on it, over what its body may say."""
        known = self._tickets.get(request.request_id)
        ticket = known or current_ticket.get() or Ticket()
        ticket.adapter = "" if request.lora_request is None else request.lora_request.lora_name
        request.lora_request = request.lora_request or self._policy
        request.cache_salt = tenant_salt(ticket.tenant, request.cache_salt)
        if ticket.priority is not None:
            request.priority = ranked(ticket.priority, request.priority)
        if ticket.charge is not None and request_index == 0:  # choices share their prompt
            ids, embeds = request.prompt_token_ids, request.prompt_embeds
            ticket.charge(length_from_prompt_token_ids_or_embeds(ids, embeds))
        super().add_request(request, prompt, parent_req, request_index, queue)
        if known is None:  # else a further piece of a streamed input
            ticket.engine_ids.append(request.request_id)
            self._tickets[request.request_id] = ticket

    def process_outputs(
        self, engine_core_outputs: list[EngineCoreOutput], *args: Any, **kwargs: Any
    ) -> Any:
        for output in engine_core_outputs:
            ticket = self._tickets.get(output.request_id)
            if ticket is not None and ticket.steps is not None and output.new_token_ids:
                ticket.steps.append(len(output.new_token_ids))
        return super().process_outputs(engine_core_outputs, *args, **kwargs)

    def propagate_error(self, e: Exception) -> None:
        if isinstance(e, EngineDeadError):
            e = EngineUnavailable(DIED)
        super().propagate_error(e)

    def _finish_request(self, req_state: RequestState) -> None:
        super()._finish_request(req_state)
        self._end(req_state)

    def abort_requests(self, request_ids: Iterable[str], internal: bool) -> list[str]:
        before = dict(self.request_states)
        aborted = super().abort_requests(request_ids, internal)
        for request_id in aborted:
            if request_id in before and request_id in self._tickets:
                self._end(before[request_id])
        return aborted

    def _end(self, state: RequestState) -> None:
        ticket = self._tickets.pop(state.request_id)
        if state.detokenizer is not None:
            ticket.note_policies(state)
            tokens = state.detokenizer.num_output_tokens()
            if ticket.charge is not None:
                ticket.charge(tokens)
            self._served.end(ticket.tenant, tokens)
            self._on_end(state.request_id, tokens, ticket)

    def served(self) -> dict[str, ServedCount]:
        """By tenant: what clients were given so far, and the requests under way."""
        return self._served.now(
            (self._tickets[state.request_id].tenant, state.detokenizer.num_output_tokens())
            for state in self.request_states.values()
            if state.detokenizer is not None
        )


class EngineUnavailable(GracefulHTTPError):
    """A request ends because its engine does: 503, as JSON or as a stream's last event."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason, HTTPStatus.SERVICE_UNAVAILABLE)


DIED = "The engine died while it served this request, and is being started again; send it anew."


class PacelineLLM(AsyncLLM):
    """AsyncLLM that calls ``on_end`` once for each request; set it before the first request."""

    on_end: EndCallback
    policy_adapter: LoRARequest | None = None
    """The policy, where its versions are adapters; to be set as early."""
    output_processor: OutputProcessor

    def _run_output_handler(self) -> None:
        if self.output_handler is None and not isinstance(self.output_processor, RequestLedger):
            self.output_processor = RequestLedger(
                self.output_processor, self._report_end, self.policy_adapter
            )
        super()._run_output_handler()

    async def add_request(self, *args: Any, **kwargs: Any) -> RequestOutputCollector:
        try:
            return await super().add_request(*args, **kwargs)
        except EngineDeadError:
            raise EngineUnavailable(DIED) from None

    @property
    def dead_error(self) -> BaseException:
        return EngineUnavailable(DIED)

    def fail_calls(self) -> None:
        """The engine has died: whoever waits for its answer to a call is told so; vLLM lets them wait."""
        for future in list(self.engine_core.utility_results.values()):
            if not future.done():
                future.set_exception(EngineDeadError())

    def end_requests(self, reason: str) -> None:
        """End what runs, with ``reason`` as each one's error. The engine itself is not told."""
        self.output_processor.propagate_error(EngineUnavailable(reason))

    def begun(self) -> list[int]:
        """The tokens, prompt and output, of each request that has begun to answer."""
        return [
            state.prompt_len + state.detokenizer.num_output_tokens()
            for state in self.output_processor.request_states.values()
            if state.detokenizer is not None and state.detokenizer.num_output_tokens()
        ]

    def served(self) -> dict[str, ServedCount]:
        """By tenant: the output tokens that clients were given so far, and the requests under way."""
        processor = self.output_processor
        return processor.served() if isinstance(processor, RequestLedger) else {}

    def stop_engine(self, reason: str) -> None:
        """The engine ends at its next step, with ``reason``; whether it can be asked is not waited for."""
        self._stopping = asyncio.ensure_future(self._stop(reason))

    async def _stop(self, reason: str) -> None:
        await self.collective_rpc("paceline_stop", args=(reason,))
        await self.resume_generation()  # one that is paused takes no step to end at

    def _report_end(self, request_id: str, output_tokens: int, ticket: Ticket) -> None:
        self.on_end(request_id, output_tokens, ticket)
