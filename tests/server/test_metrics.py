"""Our families on /metrics: their names, labels and values, as the README documents them."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from rlcore.records.acceptance import AcceptanceCount, AdapterAcceptance
from rlcore.records.engine_link import CaptureCounts, EngineReport
from rlcore.records.learner_link import LearnerReport
from server.drafts import SwapStatistics
from server.history import Change
from server.metrics import PacelineCollector
from server.model_cores import ModelCores
from server.policy import Policy
from server.status import ServerState

ENGINE = {
    "paceline_ready": ("gauge", set()),
    "paceline_engine_restarts": ("counter", set()),
    "paceline_requests_refused": ("counter", {"reason"}),
    "paceline_acceptance_length": ("gauge", {"draft_version"}),
    "paceline_draft_tokens": ("counter", {"draft_version", "position"}),
    "paceline_accepted_tokens": ("counter", {"draft_version", "position"}),
    "paceline_rejected_tokens": ("counter", {"draft_version", "position"}),
    "paceline_acceptance_rate": ("gauge", {"draft_version", "position"}),
    "paceline_decode_steps": ("counter", {"draft_version", "drafted"}),
    "paceline_adapter_acceptance_length": ("gauge", {"adapter"}),
    "paceline_adapter_decode_steps": ("counter", {"adapter", "drafted"}),
    "paceline_adapter_emitted_tokens": ("counter", {"adapter"}),
    "paceline_traces_captured": ("counter", set()),
    "paceline_traces_sent": ("counter", set()),
    "paceline_traces_dropped": ("counter", {"reason"}),
    "paceline_live_draft": ("gauge", {"draft_version", "method"}),
    "paceline_swaps": ("counter", set()),
    "paceline_policy_version": ("gauge", set()),
    "paceline_policy_swaps": ("counter", set()),
    "paceline_failed_policy_swaps": ("counter", {"reason"}),
    "paceline_policy_stall_seconds": ("counter", set()),
    "paceline_rollbacks": ("counter", set()),
    "paceline_draft_collapsed": ("gauge", set()),
    "paceline_failed_swaps": ("counter", {"reason"}),
    "paceline_swap_seconds": ("counter", set()),
    "paceline_learner_up": ("gauge", set()),
}
LEARNER = {
    "paceline_traces_received": ("counter", set()),
    "paceline_traces_rejected": ("counter", {"reason"}),
    "paceline_trained_tokens": ("counter", set()),
    "paceline_learner_updates": ("counter", set()),
    "paceline_publications": ("counter", set()),
    "paceline_replay_tokens": ("gauge", set()),
    "paceline_learner_loss": ("gauge", set()),
    "paceline_heldout_acceptance_length": ("gauge", set()),
    "paceline_live_heldout_acceptance_length": ("gauge", set()),
}


def state(report: EngineReport | None, learner: Any) -> ServerState:
    statistics = SwapStatistics(count=3, failed={"digest": 2}, seconds_sum=0.75)
    change = Change(0.0, 4, 5, "rolled_back", "worse")
    history = SimpleNamespace(rollbacks=lambda: [change])
    drafts = SimpleNamespace(
        live=5, previous=4, method="eagle3", statistics=statistics, history=history
    )
    policy = Policy(Path("t"), 0)
    policy.live, policy.count, policy.failed, policy.stall_seconds = 7, 2, {"shape": 1}, 0.5
    return ServerState(
        drafts=drafts, engine_link=SimpleNamespace(report=report), learner_link=learner,
        policy=policy, cores=ModelCores(0, 0), target_id="t", speculative_tokens=3, started=0.0,
        ready=lambda: True, engine_restarts=lambda: 2, refused={"overloaded": 5},
    )  # fmt: skip


def engine_report() -> EngineReport:
    count = AcceptanceCount(5)
    for k, accepted in ((3, 3), (3, 1), (3, 0), (0, 0)):
        count.observe(k, accepted)
    capture = CaptureCounts(9, 7, {"queue_full": 2})
    adapter = AcceptanceCount(-1)
    adapter.observe(3, 1)
    adapter.observe(0, 0)
    adapters = [AdapterAcceptance("french", adapter)]
    return EngineReport("w", 5, 3, [count], capture, adapters=adapters)


def scrape(state: ServerState) -> dict[str, Any]:
    registry = CollectorRegistry()
    registry.register(PacelineCollector(state))
    text = generate_latest(registry).decode()
    return {family.name: family for family in text_string_to_metric_families(text)}


def value(families: dict[str, Any], name: str, **labels: str) -> float:
    found = [
        sample.value
        for family in families.values()
        for sample in family.samples
        if sample.name == name and sample.labels == labels
    ]
    (one,) = found
    return one


def full() -> dict[str, Any]:
    report = LearnerReport(
        pid=1, phase="training", received=6, rejected={"malformed": 4}, replay_tokens=100,
        tokens_seen=800, updates=12, loss=1.5, heldout_length=1.8, live_length=1.4, published=2,
    )  # fmt: skip
    return scrape(state(engine_report(), SimpleNamespace(alive=True, report=report)))


def test_every_family_has_its_documented_name_type_and_labels():
    families = full()
    assert {n: f.type for n, f in families.items()} == {
        n: kind for n, (kind, _) in (ENGINE | LEARNER).items()
    }
    for name, (_, labels) in (ENGINE | LEARNER).items():
        assert families[name].samples, name
        assert all(set(s.labels) == labels for s in families[name].samples), name
        assert families[name].documentation


def test_readiness_restarts_and_refusals_are_told():
    families = full()
    assert value(families, "paceline_ready") == 1
    assert value(families, "paceline_engine_restarts_total") == 2
    assert value(families, "paceline_requests_refused_total", reason="overloaded") == 5


def test_acceptance_is_counted_by_version_and_position():
    families = full()
    assert value(families, "paceline_acceptance_length", draft_version="5") == 7 / 3
    for position, (accepted, rate) in enumerate(((2, 2 / 3), (1, 1 / 2), (1, 1.0))):
        at = {"draft_version": "5", "position": str(position)}
        assert value(families, "paceline_draft_tokens_total", **at) == 3
        assert value(families, "paceline_accepted_tokens_total", **at) == accepted
        assert value(families, "paceline_rejected_tokens_total", **at) == 3 - accepted
        assert value(families, "paceline_acceptance_rate", **at) == rate
    assert value(families, "paceline_decode_steps_total", draft_version="5", drafted="yes") == 3
    assert value(families, "paceline_decode_steps_total", draft_version="5", drafted="no") == 1


def test_acceptance_is_counted_by_adapter():
    families = full()
    assert value(families, "paceline_adapter_acceptance_length", adapter="french") == 2
    assert value(families, "paceline_adapter_emitted_tokens_total", adapter="french") == 2
    for drafted in ("yes", "no"):
        labels = {"adapter": "french", "drafted": drafted}
        assert value(families, "paceline_adapter_decode_steps_total", **labels) == 1


def test_swaps_traces_and_the_learner_are_counted():
    families = full()
    assert value(families, "paceline_swaps_total") == 3
    assert value(families, "paceline_rollbacks_total") == 1
    assert value(families, "paceline_policy_version") == 7
    assert value(families, "paceline_policy_swaps_total") == 2
    assert value(families, "paceline_failed_policy_swaps_total", reason="shape") == 1
    assert value(families, "paceline_policy_stall_seconds_total") == 0.5
    assert value(families, "paceline_swap_seconds_total") == 0.75
    assert value(families, "paceline_failed_swaps_total", reason="digest") == 2
    assert value(families, "paceline_live_draft", draft_version="5", method="eagle3") == 1
    assert value(families, "paceline_traces_captured_total") == 9
    assert value(families, "paceline_traces_sent_total") == 7
    assert value(families, "paceline_traces_dropped_total", reason="queue_full") == 2
    assert value(families, "paceline_traces_received_total") == 6
    assert value(families, "paceline_traces_rejected_total", reason="malformed") == 4
    assert value(families, "paceline_trained_tokens_total") == 800
    assert value(families, "paceline_learner_up") == 1


def test_before_the_first_reports_everything_can_be_scraped():
    for learner in (None, SimpleNamespace(alive=False, report=None)):
        families = scrape(state(None, learner))
        assert set(families) == set(ENGINE)
        assert value(families, "paceline_learner_up") == 0
        assert value(families, "paceline_traces_sent_total") == 0


def test_a_version_that_never_drafted_has_no_length():
    report = engine_report()
    plain = AcceptanceCount(0)
    plain.observe(0, 0)
    report.acceptance.append(plain)
    families = scrape(state(report, None))
    lengths = families["paceline_acceptance_length"].samples
    assert [s.labels["draft_version"] for s in lengths] == ["5"]
