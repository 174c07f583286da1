"""The trained policy as a normal Hugging Face folder, that ``paceline serve --target`` opens."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

from rlcore.rl.learn import PolicyLearner
from rlcore.weights import CONFIG

POLICY = "policy"
"""Folder in the run's own."""

COPIED = (
    "tokenizer*",
    "special_tokens_map.json",
    "chat_template*",
    "vocab*",
    "merges.txt",
    "*.model",
)
"""What goes with the weights unchanged."""


def export(learner: PolicyLearner, base: Path, folder: Path) -> None:
    """Write it whole or not at all, over one of before; raises OSError."""
    partial = folder.with_name(f".{folder.name}.{os.getpid()}")
    shutil.rmtree(partial, ignore_errors=True)
    try:
        learner.policy.save_pretrained(partial)
        (partial / CONFIG).write_text(json.dumps(learner.config(), indent=2))
        for pattern in COPIED:
            for source in base.glob(pattern):
                shutil.copy(source, partial)
        shutil.rmtree(folder, ignore_errors=True)
        partial.rename(folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
