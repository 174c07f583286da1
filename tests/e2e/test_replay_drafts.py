"""The learner's drafters, fed with captured traces, draft what the engine drafted."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from learner.drafters.base import Drafter
from learner.drafters.registry import DRAFTERS
from learner.estimate import chain_lengths, replay_drafts
from learner.target import Target
from rlcore.records.acceptance import AcceptanceCount
from tests.conftest import SPECULATIVE_TOKENS, Served
from tests.e2e.tap import Captured

torch.set_num_threads(1)

pytestmark = pytest.mark.slow

QUESTIONS = [
    "Why is the sky blue?",
    "List five animals that live in the forest.",
    "Write two sentences about the sea.",
    "What is seven times eight?",
    "Explain how bread is baked.",
    "Who wrote Romeo and Juliet?",
    "Give me three tips for a job interview.",
    "Describe a rainy day in a town.",
]
TOKENS = 60
"""Less than the second server's span length with the prompt: each request is one whole span."""


def drafter_of(served: Served) -> Drafter:
    """The very weights that the server drafts with."""
    version = served.server.status()["draft"]["live"]
    folder = served.store.folder(version)
    return DRAFTERS[served.method].load(folder, Target.open(served.target)).eval()


def greedy_spans(served: Served, tokens: int) -> list[list[Captured]]:
    """Each question's spans; the prompts are new to the prefix cache."""

    def ask(question: str) -> Any:
        return served.openai.chat.completions.create(
            model=served.model, messages=[{"role": "user", "content": question}],
            max_tokens=tokens, temperature=0.0,
        )  # fmt: skip

    with ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(ask, QUESTIONS, timeout=200))
    return [served.tap.of_response(a.id, a.usage.completion_tokens) for a in answers]


def agreement(drafter: Drafter, spans: list[Captured]) -> tuple[int, int]:
    """(equal, all) served draft ids of steps that a span with its whole context can replay."""
    equal = total = 0
    for captured in spans:
        assert captured.trace.first_position == 0
        replayed = replay_drafts(drafter, captured.span)
        for step, drafts in zip(captured.trace.steps, replayed, strict=True):
            if drafts is not None:
                total += len(step.draft_ids)
                equal += sum(a == b for a, b in zip(drafts, step.draft_ids, strict=True))
    return equal, total


@pytest.mark.on_server("eagle3")
def test_a_captured_request_gives_the_eagle3_drafts_that_were_served(served: Served) -> None:
    spans = [request[0] for request in greedy_spans(served, TOKENS)]
    equal, total = agreement(drafter_of(served), spans)
    print(f"eagle3: {equal} of {total} served draft ids reproduced")
    assert total > 500
    assert equal >= 0.99 * total


@pytest.mark.on_server("draft_model")
def test_a_draft_model_is_replayed_and_its_live_acceptance_estimated(served: Served) -> None:
    requests = greedy_spans(served, TOKENS)
    drafter = drafter_of(served)
    # Only a request's first span holds all that the engine's drafter had read.
    first = [request[0] for request in requests]
    equal, total = agreement(drafter, first)
    print(f"draft_model: {equal} of {total} served draft ids reproduced")
    assert total > 200
    assert equal >= 0.99 * total

    live = AcceptanceCount(0)
    for captured in first:
        for step in captured.trace.steps:
            # The estimate leaves out anchors with less than K rows ahead; so does this count.
            rows_ahead = captured.span.rows - (step.position - 1 - captured.trace.first_position)
            if step.draft_ids and rows_ahead >= SPECULATIVE_TOKENS:
                live.observe(len(step.draft_ids), step.accepted)
    estimates = chain_lengths(drafter, [c.span for c in first], SPECULATIVE_TOKENS)
    emitted, steps = sum(e.emitted for e in estimates), sum(e.steps for e in estimates)
    print(f"acceptance length: estimated {emitted / steps:.4f}, live {live.length:.4f}")
    assert live.length is not None
    assert live.length > 1.2
    assert emitted / steps == pytest.approx(live.length, rel=0.05)
