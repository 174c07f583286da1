"""The server's own reading of its drafter: a collapse of acceptance is seen, and seen to end."""

from pathlib import Path
from types import SimpleNamespace

from rlcore.records.acceptance import AcceptanceCount
from rlcore.records.engine_link import CaptureCounts, EngineReport
from server.model_cores import ModelCores
from server.policy import Policy
from server.status import ServerState


def state(origin: str) -> ServerState:
    drafts = SimpleNamespace(live=3, manifest=lambda: SimpleNamespace(origin=origin))
    return ServerState(
        drafts=drafts, engine_link=SimpleNamespace(report=None), learner_link=None,
        policy=Policy(Path("t"), 0), cores=ModelCores(0, 0), target_id="t", speculative_tokens=3, started=0.0,
    )  # fmt: skip


def report(steps: int, emitted: int) -> EngineReport:
    counts = [AcceptanceCount(2, steps=9000, emitted=20000), AcceptanceCount(3, steps, 0, emitted)]
    return EngineReport("w", 3, 3, counts, CaptureCounts())


def test_a_trained_draft_that_gets_nothing_accepted_raises_the_alarm():
    server = state("learned")
    server.look_for_collapse(report(0, 0))
    for second in range(1, 20):
        server.look_for_collapse(report(40 * second, 40 * second))
    assert server.collapse.active
    for second in range(20, 40):
        server.look_for_collapse(report(40 * second, 80 * second))
    assert not server.collapse.active


def test_an_untrained_draft_raises_none():
    server = state("untrained")
    for second in range(20):
        server.look_for_collapse(report(40 * second, 40 * second))
    assert not server.collapse.active


def test_a_version_that_has_not_drafted_yet_raises_none():
    server = state("learned")
    empty = EngineReport("w", 3, 3, [], CaptureCounts())
    for _ in range(5):
        server.look_for_collapse(empty)
    assert not server.collapse.active
