"""Rollouts, settings and a small policy for the tests of this package."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from rlcore.records.trace import Sampling
from rlcore.rl.settings import RLTrainSettings
from rlcore.rollout import NOT_SAMPLED, Rollout, check_rollout

VOCABULARY = 48


def a_rollout(
    name: str = "0.0",
    *,
    prompt: Sequence[int] = (1, 2, 3),
    sampled: Sequence[int] = (4, 5),
    logprob: float = -1.0,
    version: int = 0,
    reward: float = 0.0,
    correct: bool = False,
    finish: str = "stop",
    task: str = "task",
) -> Rollout:
    """One turn; ``name`` is group.number."""
    n, m = len(prompt), len(sampled)
    return check_rollout(
        Rollout(
            rollout_id=name,
            task_id=task,
            group_id=name.split(".")[0],
            token_ids=[*prompt, *sampled],
            prompt_length=n,
            loss_mask=[False] * n + [True] * m,
            logprobs=[0.0] * n + [logprob] * m,
            policy_versions=[NOT_SAMPLED] * n + [version] * m,
            sampling=Sampling(),
            draft_version=0,
            finish_reason=finish,
            reward=reward,
            correct=correct,
        )
    )


def make_policy(folder: Path, seed: int = 0) -> Path:
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, initializer_range=0.2,
        tie_word_embeddings=True, bos_token_id=1, eos_token_id=0,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def make_settings(out: Path, **changed: Any) -> RLTrainSettings:
    """Of a small run; ``recipe`` and ``optimiser`` are dictionaries."""
    given = {
        "algorithm": "dr_grpo",
        "groups_per_update": 2,
        "group_size": 2,
        "optimiser": {"lr": 3e-3, "micro_batch_tokens": 16, "threads": 1, "device": "cpu"},
    }
    return RLTrainSettings(out=out, **{**given, **changed})
