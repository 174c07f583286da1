"""What the courier holds of a tenant that is purged goes nowhere; what it holds of others does."""

from __future__ import annotations

from typing import Any

from rlcore.engine.courier import Courier
from rlcore.engine.options import EngineOptions
from rlcore.records.engine_link import RequestEnd


def courier() -> Courier:
    options = EngineOptions(
        target_version=0, draft_version=0, draft_rates=[], speculation="fixed",
        link_endpoint="ipc:///nowhere", trace_endpoint=None, capture_rate=1.0,
        capture_span_tokens=64, capture_queue=16,
    )  # fmt: skip
    report: Any = None
    return Courier(options, report, lambda _: (0, 0))


def span() -> Any:
    return object()


def test_spans_of_an_ended_request_are_dropped_and_its_later_ones_too():
    one = courier()
    for name in ("a1", "b1"):
        one.offer(name, span(), False)
    one._take_spans()
    for name in ("a1", "b1"):
        one._ends[name] = RequestEnd(name, 5, tenant=name[0])
    one._forget("a")
    one.offer("a1", span(), True)
    one._take_spans()
    assert "a1" not in one._held
    assert one._snapshot().dropped == {"purged": 1, "opted_out": 1}
    assert len(one._held["b1"].spans) == one._held_spans == 1
    assert one._ends["b1"].learn
