"""The families of what speculation gains and of tenants: names, labels, values, bounds."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from rlcore.engine.shares import NAMED, Served, ServedCount, Shares
from rlcore.records.engine_link import CaptureCounts, EngineReport, ShareCount, SpeculationReport
from server.metrics_gain import GainCollector

FAMILIES = {
    "paceline_speedup": ("gauge", set()),
    "paceline_draft_length": ("gauge", set()),
    "paceline_scheduled_steps": ("counter", set()),
    "paceline_scheduled_drafts": ("counter", set()),
    "paceline_scheduled_tokens": ("counter", set()),
    "paceline_compute_seconds": ("counter", {"compared"}),
    "paceline_plain_compute_seconds": ("counter", set()),
    "paceline_tenant_tokens": ("counter", {"tenant"}),
    "paceline_tenant_requests": ("gauge", {"tenant"}),
    "paceline_tenant_drafted_steps": ("counter", {"tenant"}),
    "paceline_tenant_emitted_tokens": ("counter", {"tenant"}),
    "paceline_tenant_traces_sent": ("counter", {"tenant"}),
    "paceline_feed_subscribers": ("gauge", set()),
    "paceline_feeds_dropped": ("counter", set()),
}


def scrape(
    speedup: float | None,
    speculation: SpeculationReport | None,
    report: EngineReport | None,
    served: dict[str, ServedCount],
) -> dict[str, Any]:
    state: Any = SimpleNamespace(
        engine_link=SimpleNamespace(report=report, speculation=speculation), served=lambda: served
    )
    last = None if speedup is None else SimpleNamespace(speedup=speedup)
    feed: Any = SimpleNamespace(last=last, subscribers=2, dropped=1)
    registry = CollectorRegistry()
    registry.register(GainCollector(state, feed))
    text = generate_latest(registry).decode()
    return {family.name: family for family in text_string_to_metric_families(text)}


def value(families: dict[str, Any], name: str, **labels: str) -> float:
    family = families[name.removesuffix("_total")]
    (one,) = [s.value for s in family.samples if s.name == name and s.labels == labels]
    return one


SPECULATION = SpeculationReport("s", 3, 100, 290, 240, 8.0, 12.5, 0.5)
REPORT = EngineReport(
    "w", 1, 3, [], CaptureCounts(), tenants=[ShareCount("a", steps=10, emitted=25, traces=4)]
)


def test_every_family_has_its_documented_name_type_and_labels():
    families = scrape(1.5, SPECULATION, REPORT, {"a": ServedCount(70, 1)})
    assert {n: f.type for n, f in families.items()} == {
        n: kind for n, (kind, _) in FAMILIES.items()
    }
    for name, (_, labels) in FAMILIES.items():
        assert families[name].samples, name
        assert all(set(s.labels) == labels for s in families[name].samples), name


def test_the_values_are_the_reports():
    families = scrape(1.5, SPECULATION, REPORT, {"a": ServedCount(70, 1)})
    assert value(families, "paceline_speedup") == 1.5
    assert value(families, "paceline_draft_length") == 3
    assert value(families, "paceline_scheduled_drafts_total") == 290
    assert value(families, "paceline_compute_seconds_total", compared="yes") == 8.0
    assert value(families, "paceline_compute_seconds_total", compared="no") == 0.5
    assert value(families, "paceline_plain_compute_seconds_total") == 12.5
    assert value(families, "paceline_tenant_tokens_total", tenant="a") == 70
    assert value(families, "paceline_tenant_requests", tenant="a") == 1
    assert value(families, "paceline_tenant_emitted_tokens_total", tenant="a") == 25
    assert value(families, "paceline_tenant_traces_sent_total", tenant="a") == 4
    assert value(families, "paceline_feeds_dropped_total") == 1


def test_before_the_first_reports_everything_can_be_scraped():
    families = scrape(None, None, None, {})
    assert "paceline_speedup" not in families
    assert value(families, "paceline_feed_subscribers") == 2


def test_however_many_tenants_there_are_few_are_labels():
    shares, served = Shares(), Served()
    for number in range(1000):
        shares.of(f"{number}").traces += 1
        served.end(f"{number}", 1)
    report = EngineReport("w", 1, 3, [], CaptureCounts(), tenants=shares.counts())
    families = scrape(None, None, report, served.now([]))
    for name in ("paceline_tenant_tokens", "paceline_tenant_traces_sent"):
        samples = [s for s in families[name].samples if s.name.endswith("_total")]
        assert len(samples) == NAMED + 1
        assert sum(s.value for s in samples) == 1000
