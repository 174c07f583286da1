"""Totals over engines that came one after the other."""

from __future__ import annotations

import asyncio
from pathlib import Path

import zmq
from hypothesis import given
from hypothesis import strategies as st

from rlcore.engine.shares import ServedCount
from rlcore.records.acceptance import AcceptanceCount, AdapterAcceptance
from rlcore.records.engine_link import CaptureCounts, EngineReport, ShareCount, SpeculationReport
from rlcore.records.wire import encode
from rlcore.transport import open_socket
from server.engine_link import EngineLink
from server.totals import ServedTotals, added, added_speculation

counts = st.integers(0, 1000)


@st.composite
def acceptance(draw: st.DrawFn, version: int) -> AcceptanceCount:
    k = draw(st.integers(0, 4))
    return AcceptanceCount(
        version, draw(counts), draw(counts), draw(counts),
        draw(st.lists(counts, min_size=k, max_size=k)), draw(st.lists(counts, min_size=k, max_size=k)),
    )  # fmt: skip


@st.composite
def reports(draw: st.DrawFn) -> EngineReport:
    versions = draw(st.sets(st.integers(0, 5)))
    names = draw(st.sets(st.sampled_from("abc")))
    reasons = st.dictionaries(st.sampled_from(["queue_full", "no_end"]), counts)
    return EngineReport(
        "1", 0, 3,
        [draw(acceptance(v)) for v in sorted(versions)],
        CaptureCounts(draw(counts), draw(counts), draw(reasons)),
        running=draw(counts),
        adapters=[AdapterAcceptance(n, draw(acceptance(-1)), [draw(acceptance(1))]) for n in names],
        tenants=[ShareCount(n, draw(counts), draw(counts), draw(counts)) for n in names],
    )  # fmt: skip


def totals(report: EngineReport) -> dict[str, float]:
    """Every counter of a report, by a name of its own."""
    found: dict[str, float] = {
        "captured": report.capture.captured,
        "sent": report.capture.sent,
        **{f"dropped {reason}": n for reason, n in report.capture.dropped.items()},
    }
    parts = {f"version {a.version}": a for a in report.acceptance}
    parts |= {f"adapter {a.adapter}": a.total for a in report.adapters}
    parts |= {f"adapter {a.adapter} {v.version}": v for a in report.adapters for v in a.versions}
    for name, one in parts.items():
        found |= {f"{name} steps": one.steps, f"{name} plain": one.plain_steps}
        found |= {f"{name} emitted": one.emitted}
        found |= {f"{name} drafted {i}": n for i, n in enumerate(one.drafted)}
        found |= {f"{name} accepted {i}": n for i, n in enumerate(one.accepted)}
    for tenant in report.tenants:
        found |= {f"tenant {tenant.name} {i}": n for i, n in
                  enumerate((tenant.steps, tenant.emitted, tenant.traces))}  # fmt: skip
    return found


@given(reports(), reports())
def test_every_total_of_two_engines_is_the_sum_of_theirs(before, now):
    first, second, both = totals(before), totals(now), totals(added(before, now))
    assert both == {k: first.get(k, 0) + second.get(k, 0) for k in first.keys() | second.keys()}
    assert added(before, now).running == now.running


def test_the_schedulers_totals_are_summed_and_its_present_is_not():
    before = SpeculationReport("1", 3, 10, 20, 30, 4.0, 5.0, 6.0, 7, 8)
    both = added_speculation(before, SpeculationReport("2", 1, 1, 2, 3, 0.5, 0.25, 0.125, 1, 2))
    assert both == SpeculationReport("2", 1, 11, 22, 33, 4.5, 5.25, 6.125, 1, 2)


def test_what_tenants_were_given_counts_on_and_nothing_of_a_dead_engine_runs():
    served = ServedTotals()
    assert served() == {}
    served.connect(lambda: {"a": ServedCount(10, 2), "b": ServedCount(1)})
    assert served()["a"] == ServedCount(10, 2)
    served.disconnect()
    assert served() == {"a": ServedCount(10), "b": ServedCount(1)}
    served.connect(lambda: {"a": ServedCount(5, 1), "c": ServedCount(7)})
    assert served() == {"a": ServedCount(15, 1), "b": ServedCount(1), "c": ServedCount(7)}


def report(steps: int, running: int = 0) -> EngineReport:
    return EngineReport(
        "1", 0, 3, [AcceptanceCount(0, steps)], CaptureCounts(steps), running=running
    )


def test_a_new_engine_counts_on_and_the_word_of_a_dead_one_is_not_heard(tmp_path: Path):
    async def run() -> None:
        link = EngineLink(endpoint := f"ipc://{tmp_path}/link")
        task = asyncio.ensure_future(link.run())
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        old, new = (open_socket(context, zmq.DEALER, endpoint, bind=False) for _ in range(2))
        try:
            old.send(encode(report(10, running=2)))
            await link.wait_for_worker(5)
            assert steps(link) == 10
            link.forget_workers()
            assert steps(link) == 10
            assert link.report is not None
            assert link.report.running == 0
            old.send(encode(report(11)))  # was on its way when it died
            new.send(encode(report(3)))
            await link.wait_for_worker(5)
            await asyncio.sleep(0.2)
            assert steps(link) == 13
            link.forget_workers()
            assert steps(link) == 13
        finally:
            task.cancel()
            link.close()
            context.destroy(linger=0)

    def steps(link: EngineLink) -> int:
        assert link.report is not None
        return link.report.acceptance[0].steps

    asyncio.run(run())
