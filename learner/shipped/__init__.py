"""Drafters that come with the package, by the identity of their target.

Each is a folder with safetensors, configuration, manifest and a card (``CARD.md``) that says what it
was trained on and what it reached.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from rlcore.records.versions import DraftManifest
from rlcore.weights import MANIFEST


def shipped_drafts(root: Path = Path(__file__).parent) -> dict[tuple[str, str], Path]:
    """(target id, method) -> folder."""
    found = {}
    for path in sorted(root.glob(f"*/{MANIFEST}")):
        manifest = msgspec.json.decode(path.read_bytes(), type=DraftManifest)
        found[manifest.target_id, manifest.method] = path.parent
    return found


def shipped_draft(target_id: str, method: str) -> Path | None:
    """The folder of the drafter that comes with the package for this target, if there is one."""
    return shipped_drafts().get((target_id, method))
