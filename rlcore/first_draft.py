"""The drafter that an engine starts with: made, imported, or the one that was live here last."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from rlcore.errors import PacelineError
from rlcore.home import Home
from rlcore.settings import ServeSettings
from rlcore.weights import WeightStore


class FirstDraftError(PacelineError):
    """There is no drafter to start with."""


def first_draft(settings: ServeSettings, home: Home, target: Path, target_id: str) -> WeightStore:
    """The store of this target's drafters, with a live one in it; raises FirstDraftError."""
    store = WeightStore(home.drafts / f"{target_id}-{settings.draft_method}")
    command = [
        sys.executable, "-P", "-m", "learner.first_draft",
        "--target", str(target),
        "--target-id", target_id,
        "--method", settings.draft_method,
        "--draft", settings.draft,
        "--draft-vocab", str(settings.draft_vocab),
        "--store", str(store.root),
        "--home", str(home.root),
    ]  # fmt: skip
    # Another process, because this package imports nothing of the learner.
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=None, text=True, check=False)
    if done.returncode != 0:
        words = done.stdout.strip().splitlines()
        raise FirstDraftError(
            words[-1]
            if words
            else f"the first draft could not be made (exit code {done.returncode})"
        )
    return store
