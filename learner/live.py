"""The version in service, as the learner sees it."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

from safetensors import SafetensorError

from learner.drafters.base import Drafter
from learner.drafters.registry import DRAFTERS
from learner.target import Target
from rlcore.weights import WEIGHTS, WeightError, WeightStore

UNREADABLE = (WeightError, SafetensorError, ValueError, KeyError, RuntimeError, OSError)
"""What a version's files can be wrong with."""


@dataclass(frozen=True)
class LiveDraft:
    """Frozen weights. A version number alone could be another home's."""

    version: int
    sha256: str
    drafter: Drafter


def load_version(store: WeightStore, version: int, method: str, target: Target) -> Drafter:
    """A version to train from; raises one of UNREADABLE, also when a bit of its weights was lost."""
    folder = store.folder(version)
    with open(folder / WEIGHTS, "rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != store.manifest(version).sha256:
        raise WeightError("digest", f"{folder / WEIGHTS} is not the file its manifest names")
    return DRAFTERS[method].load(folder, target)


def load_live(store: WeightStore, version: int, method: str, target: Target) -> LiveDraft:
    """A version to compare with; raises one of UNREADABLE."""
    drafter = load_version(store, version, method, target).eval().requires_grad_(False)
    return LiveDraft(version, store.manifest(version).sha256, drafter)
