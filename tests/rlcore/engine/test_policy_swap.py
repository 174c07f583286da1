"""A swap ends by its deadlines, whatever the engine does, and an engine that missed one stops."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

import pytest

from rlcore.engine import policy_swap
from rlcore.engine.fixes import EngineUnsafe
from rlcore.engine.frontend import PacelineLLM
from rlcore.engine.policy_swap import swap_policy
from rlcore.weights import WeightError

SOON = 0.05
LATE = 5.0
"""Seconds after which a wait is taken to be without end."""

STAGED = ["paceline_policy_stage", "paceline_policy_staged"]


class Engine:
    """Answers nothing from the call ``hangs_at`` on until ``goes_on``."""

    stop_engine: Any = PacelineLLM.stop_engine
    _stop: Any = PacelineLLM._stop

    def __init__(self, hangs_at: str = "", error: str | None = None) -> None:
        self.asked: list[str] = []
        self.goes_on = asyncio.Event()
        self._hangs_at = hangs_at
        self._hangs = False
        self._error = error

    async def _call(self, name: str) -> None:
        self.asked.append(name)
        self._hangs = self._hangs or name == self._hangs_at
        if self._hangs:
            await self.goes_on.wait()

    async def collective_rpc(self, name: str, args: tuple[Any, ...] = ()) -> list[dict[str, Any]]:
        await self._call(name)
        error = self._error if name == "paceline_policy_apply" else None
        return [{"error": error, "reason": "reload", "ready": True, "seconds": 0.1}]

    async def pause_generation(self, mode: str, clear_cache: bool) -> None:
        await self._call("pause")

    async def resume_generation(self) -> None:
        await self._call("resume")

    async def update_weight_version(self, version: str) -> None:
        await self._call("version")

    def begun(self) -> list[int]:
        return [3, 4]


def swapped(engine: Any) -> Coroutine[Any, Any, Any]:
    return asyncio.wait_for(swap_policy(engine, "folder", "sha256", 1), LATE)


def test_requests_go_on_after_a_swap_and_after_one_that_was_refused():
    async def run() -> None:
        engine = Engine()
        report = await swapped(engine)
        assert (report.frozen_requests, report.frozen_tokens) == (2, 7)
        assert engine.asked == [*STAGED, "pause", "paceline_policy_apply", "version", "resume"]
        refusing = Engine(error="reload: it does not fit")
        with pytest.raises(WeightError, match="it does not fit"):
            await swapped(refusing)
        assert refusing.asked == [*STAGED, "pause", "paceline_policy_apply", "resume"]

    asyncio.run(run())


@pytest.mark.parametrize("hangs_at", ["pause", "paceline_policy_apply", "resume"])
def test_an_engine_that_hangs_is_given_up_in_time_and_stops_before_it_goes_on(
    monkeypatch, hangs_at
):
    monkeypatch.setattr(policy_swap, "APPLY_DEADLINE", SOON)

    async def run() -> None:
        engine = Engine(hangs_at)
        with pytest.raises(EngineUnsafe, match="did not exchange"):
            await swapped(engine)
        engine.goes_on.set()
        await asyncio.sleep(SOON)
        assert engine.asked[-2:] == ["paceline_stop", "resume"]

    asyncio.run(run())


@pytest.mark.parametrize("hangs_at", STAGED)
def test_a_checkpoint_that_is_not_read_in_time_is_refused(monkeypatch, hangs_at):
    monkeypatch.setattr(policy_swap, "STAGE_DEADLINE", SOON)

    async def run() -> None:
        engine = Engine(hangs_at)
        with pytest.raises(WeightError, match="deadline"):
            await swapped(engine)
        assert "pause" not in engine.asked

    asyncio.run(run())
