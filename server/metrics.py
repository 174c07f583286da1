"""Our Prometheus metrics, beside vLLM's on /metrics. Read from ServerState when scraped."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from server.status import ServerState


class PacelineCollector(Collector):
    def __init__(self, state: ServerState) -> None:
        self._state = state

    def describe(self) -> list[Metric]:
        return []

    def collect(self) -> Iterator[Metric]:
        yield from self._server()
        yield from self._acceptance()
        yield from self._adapters()
        yield from self._traces()
        yield from self._swaps()
        yield from self._policy()
        yield from self._learner()

    def _server(self) -> Iterator[Metric]:
        yield GaugeMetricFamily(
            "paceline_ready", "1 while requests are taken", value=self._state.ready()
        )
        yield CounterMetricFamily(
            "paceline_engine_restarts",
            "Times the engine was started again after it died",
            value=self._state.engine_restarts(),
        )
        yield _by_reason(
            "paceline_requests_refused",
            "Requests turned away before the engine saw them, by reason",
            self._state.refused,
        )

    def _acceptance(self) -> Iterator[Metric]:
        length = GaugeMetricFamily(
            "paceline_acceptance_length",
            "Tokens emitted per step in which something was drafted, bonus token included",
            labels=["draft_version"],
        )
        drafted = CounterMetricFamily(
            "paceline_draft_tokens",
            "Draft tokens verified, by draft version and position",
            labels=["draft_version", "position"],
        )
        accepted = CounterMetricFamily(
            "paceline_accepted_tokens",
            "Draft tokens accepted, by draft version and position",
            labels=["draft_version", "position"],
        )
        rejected = CounterMetricFamily(
            "paceline_rejected_tokens",
            "Draft tokens not accepted, by draft version and position",
            labels=["draft_version", "position"],
        )
        rate = GaugeMetricFamily(
            "paceline_acceptance_rate",
            "Accepted at a position, given that the position was reached",
            labels=["draft_version", "position"],
        )
        steps = CounterMetricFamily(
            "paceline_decode_steps", "Decode steps", labels=["draft_version", "drafted"]
        )
        for count in self._state.acceptance().values():
            version = str(count.version)
            if count.length is not None:
                length.add_metric([version], count.length)
            for i, (d, a, r) in enumerate(
                zip(count.drafted, count.accepted, count.rates, strict=True)
            ):
                drafted.add_metric([version, str(i)], d)
                accepted.add_metric([version, str(i)], a)
                rejected.add_metric([version, str(i)], d - a)
                rate.add_metric([version, str(i)], r)
            steps.add_metric([version, "yes"], count.steps)
            steps.add_metric([version, "no"], count.plain_steps)
        yield from (length, drafted, accepted, rejected, rate, steps)

    def _adapters(self) -> Iterator[Metric]:
        """Of all draft versions together: with one label for each adapter there are few enough."""
        length = GaugeMetricFamily(
            "paceline_adapter_acceptance_length",
            "Tokens emitted per step in which something was drafted, of requests for one LoRA adapter",
            labels=["adapter"],
        )
        steps = CounterMetricFamily(
            "paceline_adapter_decode_steps",
            "Decode steps of requests for one LoRA adapter",
            labels=["adapter", "drafted"],
        )
        emitted = CounterMetricFamily(
            "paceline_adapter_emitted_tokens",
            "Tokens emitted by the steps of one LoRA adapter in which something was drafted",
            labels=["adapter"],
        )
        for one in self._state.adapters():
            if one.total.length is not None:
                length.add_metric([one.adapter], one.total.length)
            steps.add_metric([one.adapter, "yes"], one.total.steps)
            steps.add_metric([one.adapter, "no"], one.total.plain_steps)
            emitted.add_metric([one.adapter], one.total.emitted)
        yield from (length, steps, emitted)

    def _traces(self) -> Iterator[Metric]:
        capture = self._state.capture()
        yield CounterMetricFamily(
            "paceline_traces_captured", "Spans captured in the engine", value=capture.captured
        )
        yield CounterMetricFamily(
            "paceline_traces_sent", "Spans handed to the learner", value=capture.sent
        )
        yield _by_reason("paceline_traces_dropped", "Spans not sent, by reason", capture.dropped)

    def _swaps(self) -> Iterator[Metric]:
        drafts = self._state.drafts
        statistics = drafts.statistics
        live = GaugeMetricFamily(
            "paceline_live_draft", "The live draft version", labels=["draft_version", "method"]
        )
        live.add_metric([str(drafts.live), drafts.method], 1)
        yield live
        yield CounterMetricFamily("paceline_swaps", "Successful swaps", value=statistics.count)
        yield _by_reason(
            "paceline_failed_swaps", "Swaps refused or undone, by reason", statistics.failed
        )
        yield CounterMetricFamily(
            "paceline_swap_seconds",
            "Seconds the engine stood still for swaps",
            value=statistics.seconds_sum,
        )

        yield GaugeMetricFamily(
            "paceline_draft_collapsed",
            "1 while nothing that the live version drafts is accepted",
            value=self._state.collapse.active,
        )
        yield CounterMetricFamily(
            "paceline_rollbacks",
            "Live versions found worse than an earlier one and taken back",
            value=len(drafts.history.rollbacks()),
        )

    def _policy(self) -> Iterator[Metric]:
        policy = self._state.policy
        yield GaugeMetricFamily(
            "paceline_policy_version", "The live version of the target", value=policy.live
        )
        yield CounterMetricFamily(
            "paceline_policy_swaps", "Versions of the target that went live", value=policy.count
        )
        yield _by_reason(
            "paceline_failed_policy_swaps", "Versions refused or undone, by reason", policy.failed
        )
        yield CounterMetricFamily(
            "paceline_policy_stall_seconds",
            "Seconds the engine stood still for versions of the target",
            value=policy.stall_seconds,
        )

    def _learner(self) -> Iterator[Metric]:
        link = self._state.learner_link
        yield GaugeMetricFamily(
            "paceline_learner_up", "1 while the learner reports", value=bool(link and link.alive)
        )
        if link is None or link.report is None:
            return
        report = link.report
        yield CounterMetricFamily(
            "paceline_traces_received", "Spans the learner took", value=report.received
        )
        yield _by_reason(
            "paceline_traces_rejected", "Messages the learner refused, by reason", report.rejected
        )
        yield CounterMetricFamily(
            "paceline_trained_tokens",
            "Positions trained on, repeats counted",
            value=report.tokens_seen,
        )
        yield CounterMetricFamily(
            "paceline_learner_updates", "Optimizer updates", value=report.updates
        )
        yield CounterMetricFamily(
            "paceline_publications", "Versions that went live", value=report.published
        )
        yield GaugeMetricFamily(
            "paceline_replay_tokens", "Positions in the replay", value=report.replay_tokens
        )
        for name, help_text, value in (
            ("paceline_learner_loss", "Training loss of the last updates", report.loss),
            (
                "paceline_heldout_acceptance_length",
                "Estimated acceptance length of the newest candidate on held-out traffic",
                report.heldout_length,
            ),
            (
                "paceline_live_heldout_acceptance_length",
                "Estimated acceptance length of the live version on that same traffic",
                report.live_length,
            ),
        ):
            if value is not None:
                yield GaugeMetricFamily(name, help_text, value=value)


def _by_reason(name: str, help_text: str, counts: dict[str, int]) -> CounterMetricFamily:
    family = CounterMetricFamily(name, help_text, labels=["reason"])
    for reason, count in sorted(counts.items()):
        family.add_metric([reason], count)
    return family
