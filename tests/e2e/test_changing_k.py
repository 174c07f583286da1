"""K changes from step to step, to 0 and back: the output stays, and so do the drafts.

The same engine runs with our upkeep of the drafter's KV cache and with vLLM's own. The drafts of both
are compared wherever both drafted for the same request at the same position; they depend on every key
and value that the steps without drafts left behind.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from learner.drafters.draft_model import DraftModel
from learner.target import Target
from tests.e2e import offline, tiny
from tests.e2e.prompts import PROMPTS

pytestmark = pytest.mark.slow

K = 3
TOKENS = 64
SHARED = "You are given the beginning of a text. Continue it with care.\n" * 20
"""Longer than a cache block: later requests find it in the prefix cache."""

SAME_DRAFTS = 0.99


def run(model: Path, draft: Path | None, method: str, worker: str) -> list[Any]:
    tokenizer = AutoTokenizer.from_pretrained(model)
    first, second = PROMPTS[:12], PROMPTS[12:24]
    sampling = [{"temperature": 0.0, "max_tokens": TOKENS - 3 * i} for i in range(12)]
    rounds = [
        offline.generate([tokenizer(SHARED + text)["input_ids"] for text in texts], sampling)
        for texts in (first, second)
    ]
    job = offline.job(
        model, draft, method, K if draft else 0, max_num_seqs=5, max_model_len=512,
        worker=f"tests.e2e.changing_k.{worker}",
        scheduler="tests.e2e.changing_k.ChangingScheduler" if draft else None,
    )  # fmt: skip
    return offline.run(job, [*rounds, offline.rpc("test_drafted")])


@pytest.fixture(scope="module")
def plain(embedded_model: Path) -> list[list[list[int]]]:
    *rounds, _ = run(embedded_model, None, "", "TellingWorker")
    return [r["tokens"] for r in rounds]


def same_tokens(rounds: list[Any], plain: list[list[list[int]]]) -> int:
    """Requests that differ from no speculation."""
    return sum(
        a != b
        for found, want in zip(rounds, plain, strict=True)
        for a, b in zip(found["tokens"], want, strict=True)
    )


def test_a_changing_k_leaves_output_and_drafts_as_they_are(embedded_model, plain, tmp_path):
    tiny.eagle(Target.open(embedded_model), 1, 2048).save(tmp_path / "draft")
    *ours, mine = run(embedded_model, tmp_path / "draft", "eagle3", "TellingWorker")
    *theirs, warm = run(embedded_model, tmp_path / "draft", "eagle3", "WarmWorker")
    assert same_tokens(ours, plain) <= 1  # a near tie of the reference
    assert same_tokens(theirs, plain) <= 1
    common = mine.keys() & warm.keys()
    assert len(common) > 200
    same = sum(mine[at] == warm[at] for at in common) / len(common)
    print(f"{len(common)} drafts compared, {same:.4f} the same")
    assert same >= SAME_DRAFTS


def test_a_changing_k_leaves_the_output_of_a_draft_model_as_it_is(embedded_model, plain, tmp_path):
    target = Target.open(embedded_model)
    DraftModel.build(target, layers=target.layers).save(tmp_path / "draft")
    *found, drafted = run(embedded_model, tmp_path / "draft", "draft_model", "TellingWorker")
    assert same_tokens(found, plain) <= 1
    assert len(drafted) > 100


def test_drafts_that_nobody_proposed_are_none(embedded_model, tmp_path):
    """Near the length limit vLLM does not ask the drafter, and would take tokens 0 for its drafts."""
    limit = 96
    tiny.eagle(Target.open(embedded_model), 1, 2048).save(tmp_path / "draft")
    job = offline.job(
        embedded_model, tmp_path / "draft", "eagle3", K, max_model_len=limit, max_num_seqs=2,
        worker="tests.e2e.changing_k.TellingWorker",
    )  # fmt: skip
    prompts = [[*range(100, 100 + limit - 16)], [*range(200, 200 + limit - 12)]]
    sampling = [{"temperature": 0.0, "max_tokens": limit}] * 2
    result, drafted = offline.run(
        job, [offline.generate(prompts, sampling), offline.rpc("test_drafted")]
    )
    assert [len(p) + len(t) for p, t in zip(prompts, result["tokens"], strict=True)] == [limit] * 2
    assert len(drafted) > 5
    assert [0] * K not in drafted.values()
