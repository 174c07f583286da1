"""The engine's front side of a policy swap: stage, pause, apply, go on. Read against vLLM 0.32.0.

A pause that keeps requests and clears the caches preempts every request with its tokens kept: after it,
each is computed again, prompt and output, under the new weights, and no block of the old ones is found
by the prefix cache. ``EngineCore`` puts its weight version on every step's output, and a request's state
notes at which output token it changed, so the version of each token is known without a race.
"""

from __future__ import annotations

import asyncio
import time
from typing import Any

import msgspec

from rlcore.engine.fixes import EngineUnsafe
from rlcore.engine.frontend import PacelineLLM
from rlcore.weights import WeightError

STAGE_DEADLINE = 600.0
"""Seconds for a checkpoint to be read and checked; nothing waits for it."""

STAGE_POLL = 0.05
"""Seconds between two looks at it."""

APPLY_DEADLINE = 120.0
"""Seconds for the step at hand to end and the weights to be exchanged; requests wait for it."""


class PolicyReport(msgspec.Struct, frozen=True):
    """What a swap cost."""

    stall_seconds: float
    """From asking for the pause to the engine going on: the step at hand is in it."""
    apply_seconds: float
    """Of that, the exchange of the weights."""
    stage_seconds: float
    """Reading and checking, beside the steps."""
    frozen_requests: int
    """Requests that had begun to answer and go on under the new weights."""
    frozen_tokens: int
    """Their tokens, which are computed again."""


async def swap_policy(llm: PacelineLLM, folder: str, sha256: str, version: int) -> PolicyReport:
    """Make a checkpoint the live policy. Raises WeightError when the old one serves on."""
    began = time.perf_counter()
    await _stage(llm, folder, sha256, version)
    started = time.perf_counter()
    frozen: list[int] = []
    try:
        async with asyncio.timeout(APPLY_DEADLINE) as deadline:
            try:
                await llm.pause_generation(mode="keep", clear_cache=True)
                frozen = llm.begun()
                report = await _apply(llm, version)
            finally:
                if not deadline.expired():  # an engine that hangs would not answer this either
                    await llm.resume_generation()
    except TimeoutError:
        # The exchange may still come to pass, and nobody would know of it.
        llm.stop_engine(f"policy version {version} was not in place after {APPLY_DEADLINE:.0f} s")
        raise EngineUnsafe(
            f"the engine did not exchange its weights within {APPLY_DEADLINE:.0f} s and stops"
        ) from None
    return PolicyReport(
        stall_seconds=time.perf_counter() - started,
        apply_seconds=report["seconds"],
        stage_seconds=started - began,
        frozen_requests=len(frozen),
        frozen_tokens=sum(frozen),
    )


async def _stage(llm: PacelineLLM, folder: str, sha256: str, version: int) -> None:
    try:
        async with asyncio.timeout(STAGE_DEADLINE):
            arguments = (folder, sha256, version)
            for report in await llm.collective_rpc("paceline_policy_stage", args=arguments):
                _raise(report)
            while True:
                reports = await llm.collective_rpc("paceline_policy_staged", args=(version,))
                for report in reports:
                    _raise(report)
                if all(report["ready"] for report in reports):
                    return
                await asyncio.sleep(STAGE_POLL)
    except TimeoutError:
        raise WeightError(
            "deadline", f"{folder} was not read within {STAGE_DEADLINE:.0f} s"
        ) from None


async def _apply(llm: PacelineLLM, version: int) -> dict[str, Any]:
    reports = await llm.collective_rpc("paceline_policy_apply", args=(version,))
    failed = [report for report in reports if report["error"] is not None]
    if failed and len(failed) < len(reports):
        llm.stop_engine(f"only some ranks took policy version {version}: {failed[0]['error']}")
        raise EngineUnsafe("the ranks of the engine hold different policies; it stops")
    for report in failed:
        _raise(report)
    await llm.update_weight_version(str(version))
    slowest: dict[str, Any] = max(reports, key=lambda report: report["seconds"])
    return slowest


def _raise(report: dict[str, Any]) -> None:
    if report["error"] is not None:
        # WeightError puts its reason in front of its detail, and it did so in the worker already.
        raise WeightError(report["reason"], report["error"].removeprefix(f"{report['reason']}: "))
