"""The trained policy as a normal Hugging Face folder, that ``paceline serve --target`` opens.

An adapter is left beside it as peft saves it, for ``paceline serve -- --enable-lora --lora-modules``.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors.torch import save_file

from rlcore.rl.learn import PolicyLearner
from rlcore.weights import ADAPTER_CONFIG, ADAPTER_WEIGHTS, CONFIG

POLICY = "policy"
"""Folder in the run's own; an adapter is merged into it."""

ADAPTER = "adapter"
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
    with _replaced(folder) as partial:
        learner.policy.save_pretrained(partial, state_dict=learner.whole())
        (partial / CONFIG).write_text(json.dumps(learner.whole_config(), indent=2))
        for pattern in COPIED:
            for source in base.glob(pattern):
                shutil.copy(source, partial)


def export_adapter(learner: PolicyLearner, folder: Path) -> None:
    """As ``export``, of a policy that is trained by an adapter: that alone."""
    with _replaced(folder) as partial:
        partial.mkdir()
        save_file(learner.snapshot(), partial / ADAPTER_WEIGHTS)
        (partial / ADAPTER_CONFIG).write_text(json.dumps(learner.config(), indent=2))


@contextmanager
def _replaced(folder: Path) -> Iterator[Path]:
    partial = folder.with_name(f".{folder.name}.{os.getpid()}")
    shutil.rmtree(partial, ignore_errors=True)
    try:
        yield partial
        shutil.rmtree(folder, ignore_errors=True)
        partial.rename(folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
