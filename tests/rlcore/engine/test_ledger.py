"""Every request that reaches the engine bears its tenant's marks, and is charged for what it used."""

from __future__ import annotations

from copy import copy
from typing import Any

import pytest
from vllm import SamplingParams
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.engine.output_processor import OutputProcessor
from vllm.v1.engine.parallel_sampling import ParentRequest

from rlcore.engine.frontend import RequestLedger, Ticket, current_ticket
from rlcore.engine.isolation import ranked, tenant_salt

Ended = list[tuple[str, int, Ticket]]


@pytest.fixture
def ended() -> Ended:
    return []


@pytest.fixture
def ledger(ended: Ended) -> RequestLedger:
    like = OutputProcessor(None, log_stats=False)
    return RequestLedger(like, lambda *end: ended.append(end), None)


def request(name: str, salt: str | None = None, priority: int = 0, n: int = 1) -> EngineCoreRequest:
    return EngineCoreRequest(
        request_id=name, external_req_id=name, prompt_token_ids=[1, 2, 3, 4, 5], mm_features=None,
        sampling_params=SamplingParams(n=n, max_tokens=8, detokenize=False), pooling_params=None,
        arrival_time=0.0, lora_request=None, cache_salt=salt, data_parallel_rank=None,
        priority=priority,
    )  # fmt: skip


def submitted(ledger: RequestLedger, ticket: Ticket | None, *args: Any, **kw: Any) -> Any:
    token = current_ticket.set(ticket)
    made = request(*args, **kw)
    try:
        ledger.add_request(made, "text")
    finally:
        current_ticket.reset(token)
    return made


def test_the_salt_is_the_tenants_whatever_the_body_asks_for(ledger):
    asked = [None, "own", tenant_salt("b", None)]
    for i, own in enumerate(asked):
        one = submitted(ledger, Ticket("a"), f"a{i}", salt=own)
        other = submitted(ledger, Ticket("b"), f"b{i}", salt=own)
        assert one.cache_salt == tenant_salt("a", own)
        assert one.cache_salt != other.cache_salt
    assert len({tenant_salt("a", own) for own in asked}) == len(asked)


def test_a_request_of_nobody_has_a_salt_too(ledger):
    assert submitted(ledger, None, "x").cache_salt == tenant_salt("default", None)


def test_the_tenants_rank_stands_over_the_bodys_where_ranks_are_in_force(ledger):
    assert submitted(ledger, Ticket("a", priority=5), "x", priority=-9).priority == ranked(5, -9)
    assert submitted(ledger, Ticket("a"), "y", priority=-9).priority == -9


def test_the_prompt_is_charged_once_for_all_choices_and_the_output_at_each_ones_end(ledger, ended):
    charged: list[int] = []
    ticket = Ticket("a", charge=charged.append)
    parent = ParentRequest(request("p", n=3))
    token = current_ticket.set(ticket)
    for index in range(3):
        child = copy(request("p", n=3))
        child.request_id, child.sampling_params = parent.get_child_info(index)
        ledger.add_request(child, "text", parent, index)
        assert child.cache_salt == tenant_salt("a", None)
    current_ticket.reset(token)
    assert charged == [5]
    states = list(ledger.request_states.values())
    assert len(states) == len(ticket.engine_ids) == 3
    ledger.abort_requests([state.request_id for state in states], internal=True)
    assert len(ended) == 3
    assert charged == [5, 0, 0, 0]
