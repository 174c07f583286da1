"""A run that trains an adapter: it alone is published, and the engine samples from what is trained."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.conftest import ONE_THREAD
from tests.e2e import tiny

torch.set_num_threads(1)

pytestmark = pytest.mark.slow

UPDATES = 4
SETTINGS = f"""
algorithm = "grpo"
updates = {UPDATES}
groups_per_update = 2
group_size = 4
concurrency = 8
evaluate_every = 0
checkpoint_every = 2
[recipe]
kl_coefficient = 0
[environment]
name = "tests.e2e.rewarding:Parity"
[sampling]
max_prompt_tokens = 64
max_tokens = 12
[optimiser]
lr = 1e-3
threads = 1
[lora]
rank = 4
[engine]
dtype = "float32"
learn_drafts = false
speculation = "fixed"
max_model_len = 128
"""


def command(module: str, *words: str) -> str:
    program = f"import sys; from {module} import console; sys.exit(console())"
    root = str(Path(__file__).parents[2])
    done = subprocess.run(
        [sys.executable, "-c", program, *words],
        env={**os.environ, **ONE_THREAD, "PYTHONPATH": root},
        capture_output=True, text=True, timeout=420, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


def lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_an_adapter_is_trained_swapped_resumed_left_and_measured(embedded_model, tmp_path):
    base, out = tmp_path / "base", tmp_path / "out"
    tokenizer = AutoTokenizer.from_pretrained(embedded_model)
    tiny.make_target(base, len(tokenizer))
    tokenizer.save_pretrained(base)
    settings = tmp_path / "run.toml"
    settings.write_text(SETTINGS)
    words = (
        str(settings),
        "--model",
        str(base),
        "--out",
        str(out),
        "--home",
        str(tmp_path / "home"),
    )
    command("rlcore.rl.command", *words, "--updates", str(UPDATES - 2))
    command("rlcore.rl.command", *words, "--resume")

    metrics = [line for line in lines(out / "metrics.jsonl") if "grad_norm" in line]
    assert [line["update"] for line in metrics] == list(range(1, UPDATES + 1))
    on_policy = [x["mismatch_kl_on_policy"] for x in metrics if "mismatch_kl_on_policy" in x]
    assert on_policy, "some tokens must have been on policy"
    assert max(on_policy) < 1e-6
    assert any(line.get("acceptance_length", 0) >= 1 for line in metrics), "drafts are verified"

    published = out / "policies" / f"{UPDATES:06d}"
    assert {path.name for path in published.iterdir()} == {
        "adapter_model.safetensors", "adapter_config.json", "manifest.json",
    }  # fmt: skip
    assert json.loads((published / "manifest.json").read_text())["lora_rank"] == 4
    factors = load_file(published / "adapter_model.safetensors")
    left = load_file(out / "adapter" / "adapter_model.safetensors")
    assert factors.keys() == left.keys()
    assert all(torch.equal(factors[name], left[name]) for name in factors)

    ids = torch.tensor([[5, 80, 3000, 41]])
    plain = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    merged = AutoModelForCausalLM.from_pretrained(out / "policy", dtype=torch.float32)
    with torch.no_grad():
        before = plain(ids).logits
        adapted = PeftModel.from_pretrained(plain, out / "adapter")(ids).logits
        torch.testing.assert_close(merged(ids).logits, adapted, atol=1e-4, rtol=1e-4)
    assert not torch.allclose(adapted, before, atol=1e-4)
    rest = (str(settings), "--evaluate-tasks", "4", "--home", str(tmp_path / "home"))
    assert "4 tasks" in command("rlcore.rl.eval_command", str(out / "adapter"), *rest)
