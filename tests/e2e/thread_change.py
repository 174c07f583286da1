"""Run by test_thread_change: processor time of a model's threads after each change of their number."""

from __future__ import annotations

import json
import os
import sys

STEPS = 30
ROUNDS = [2, 1, 2, 1]
"""Threads, one after the other."""


def main(model: str, out: str) -> None:
    import psutil
    import torch
    from vllm import LLM, SamplingParams

    from rlcore.engine import threads
    from rlcore.engine.executor import InlineExecutor

    llm = LLM(
        model=model, dtype="bfloat16", enforce_eager=True, max_model_len=512,
        distributed_executor_backend=InlineExecutor, disable_log_stats=True,
    )  # fmt: skip
    sampling = SamplingParams(temperature=0, max_tokens=STEPS, ignore_eos=True)
    process = psutil.Process()
    rounds = []
    torch.set_num_threads(ROUNDS[0])
    for count in ROUNDS:
        threads.compute_with(count)
        before = {t.id: t.user_time for t in process.threads()}
        answers = llm.generate(["Once upon a time"] * 4, sampling, use_tqdm=False)
        spent = sorted(
            (t.user_time - before.get(t.id, 0.0) for t in process.threads()), reverse=True
        )
        rounds.append({"threads": count, "seconds": spent[:2]})
    tokens = [list(answer.outputs[0].token_ids) for answer in answers]
    with open(out, "w") as file:
        json.dump({"rounds": rounds, "tokens": tokens}, file)


if __name__ == "__main__":
    if "libiomp5" in os.environ.get("LD_PRELOAD", ""):
        main(*sys.argv[1:])
    else:
        sys.exit("LD_PRELOAD must name libiomp5")
