"""A feed as a server would send it: a drafter that learns, a swap, a drift, a rollback."""

from __future__ import annotations

import math
from typing import Any

import msgspec

from rlcore.feed import (
    Change,
    DraftLength,
    History,
    LearnerSample,
    Sample,
    ShareSample,
    TraceSample,
)

START = 1_764_529_000.0
TARGET, METHOD = "SmolLM2-135M-Instruct", "eagle3"

SHARES = (
    ShareSample(name="default", tokens_per_s=41.7, tokens=91_022, running=1,
                acceptance_length=2.7, traces=398),
    ShareSample(name="team-a", tokens_per_s=19.5, tokens=20_411, running=1,
                acceptance_length=2.1, traces=0),
)  # fmt: skip


def sample(second: int, start: float = START, **changes: Any) -> Sample:
    learned = 1 - math.exp(-second / 120)
    length = 1.4 + 1.3 * learned + 0.1 * math.sin(second / 7)
    served = 38 * (0.85 + 0.3 * length) / 1.1
    first = min(0.9, 0.45 + 0.35 * learned)
    made = Sample(
        time=start + second, tokens_per_s=served, plain_tokens_per_s=38.4, speedup=served / 38.4,
        busy=0.98, drafts=DraftLength(mean=2.9, now=3, most=3), running=2, waiting=0,
        acceptance_length=length, acceptance=(first, first**2, first**3.2),
        drafted_steps_per_s=22.1, plain_steps_per_s=0.4, draft_version=7 if second > 200 else 6,
        draft_collapsed=False, policy_version=0,
        learner=LearnerSample(
            state="training", phase="training", trained_positions=181_204 + 310 * second,
            trained_per_s=310.0, updates=402 + second, loss=1.31, candidate_length=2.74,
            live_length=2.69, replay_tokens=65_021, heldout_tokens=1_800, published=7, judged=12,
        ),
        traces=TraceSample(captured=412, sent=398, dropped={"opted_out": 14}, received=398),
        tenants=SHARES,
    )  # fmt: skip
    return msgspec.structs.replace(made, **changes)


def changes(start: float = START) -> tuple[Change, ...]:
    return (
        Change(time=start + 40, kind="drift"),
        Change(time=start + 200, kind="swap", version=7, before=6, cause="promoted"),
        Change(time=start + 260, kind="rollback", version=6, before=7,
               reason="2.11 tokens a step, version 6 had 2.43"),
        Change(time=start + 280, kind="swap", version=7, before=6, cause="chosen"),
    )  # fmt: skip


def history(seconds: int, start: float = START) -> History:
    past = tuple(sample(second, start, tenants=()) for second in range(seconds))
    return History(
        samples=past, changes=changes(start), window_s=10.0, target=TARGET, method=METHOD
    )


def event(value: History | Sample | Change) -> bytes:
    name = type(value).__name__.lower()
    return f"event: {name}\ndata: ".encode() + msgspec.json.encode(value) + b"\n\n"
