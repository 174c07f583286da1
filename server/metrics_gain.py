"""Prometheus metrics of what speculation gains, and of tenants. Read when scraped."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from server.feed import Feed
from server.status import ServerState


class GainCollector(Collector):
    """Label values are bounded: at most 64 tenants are named, the others are one, ``(other)``."""

    def __init__(self, state: ServerState, feed: Feed) -> None:
        self._state = state
        self._feed = feed

    def describe(self) -> list[Metric]:
        return []

    def collect(self) -> Iterator[Metric]:
        yield from self._speculation()
        yield from self._tenants()
        yield GaugeMetricFamily(
            "paceline_feed_subscribers", "Feeds that are open", value=self._feed.subscribers
        )
        yield CounterMetricFamily(
            "paceline_feeds_dropped",
            "Feeds closed because their clients read too slowly",
            value=self._feed.dropped,
        )

    def _speculation(self) -> Iterator[Metric]:
        sample = self._feed.last
        if sample is not None and sample.speedup is not None:
            yield GaugeMetricFamily(
                "paceline_speedup",
                "Tokens per second by those estimated with no speculation, over the last seconds",
                value=sample.speedup,
            )
        report = self._state.engine_link.speculation
        if report is None:
            return
        yield GaugeMetricFamily(
            "paceline_draft_length",
            "Tokens drafted in the newest step (K)",
            value=report.drafts_now,
        )
        yield CounterMetricFamily(
            "paceline_scheduled_steps", "Engine steps that decoded", value=report.decode_steps
        )
        yield CounterMetricFamily(
            "paceline_scheduled_drafts",
            "Sum of K over those steps; by their number it is the mean K",
            value=report.drafts,
        )
        yield CounterMetricFamily(
            "paceline_scheduled_tokens", "Tokens that those steps emitted", value=report.tokens
        )
        seconds = CounterMetricFamily(
            "paceline_compute_seconds",
            "Seconds that the engine's steps took, by whether the time without speculation is known",
            labels=["compared"],
        )
        seconds.add_metric(["yes"], report.seconds)
        seconds.add_metric(["no"], report.unknown_seconds)
        yield seconds
        yield CounterMetricFamily(
            "paceline_plain_compute_seconds",
            "Seconds that the compared steps' work is estimated to take with no speculation",
            value=report.plain_seconds,
        )

    def _tenants(self) -> Iterator[Metric]:
        tokens = CounterMetricFamily(
            "paceline_tenant_tokens", "Output tokens served, by tenant", labels=["tenant"]
        )
        running = GaugeMetricFamily(
            "paceline_tenant_requests", "Requests under way, by tenant", labels=["tenant"]
        )
        for tenant, count in sorted(self._state.served().items()):
            tokens.add_metric([tenant], count.tokens)
            running.add_metric([tenant], count.running)
        yield from (tokens, running)
        steps = CounterMetricFamily(
            "paceline_tenant_drafted_steps",
            "Steps of ended requests in which drafts were verified, by tenant",
            labels=["tenant"],
        )
        emitted = CounterMetricFamily(
            "paceline_tenant_emitted_tokens",
            "Tokens that those steps emitted; by their number it is the acceptance length",
            labels=["tenant"],
        )
        traces = CounterMetricFamily(
            "paceline_tenant_traces_sent", "Spans handed to the learner", labels=["tenant"]
        )
        report = self._state.engine_link.report
        for share in [] if report is None else report.tenants:
            steps.add_metric([share.name], share.steps)
            emitted.add_metric([share.name], share.emitted)
            traces.add_metric([share.name], share.traces)
        yield from (steps, emitted, traces)
