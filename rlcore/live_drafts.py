"""Which version of a target's drafter is live, as it is written down beside the versions."""

from __future__ import annotations

from pathlib import Path

import msgspec

from rlcore.errors import PacelineError
from rlcore.records.versions import DraftManifest

LIVE_FILE = "live.json"

MOST_DRAFTS = 16
"""The most tokens a step can draft; of an untrained drafter nothing is expected at any position."""


class DraftError(PacelineError, ValueError):
    """A version that cannot be made live; the live one is untouched."""


class LiveDraft(msgspec.Struct, forbid_unknown_fields=True):
    """What ``live.json`` holds."""

    live: int
    previous: int | None = None


def read_live(root: Path) -> LiveDraft | None:
    """None when nothing was ever live here; raises DraftError when the file is damaged."""
    path = root / LIVE_FILE
    try:
        return msgspec.json.decode(path.read_bytes(), type=LiveDraft)
    except FileNotFoundError:
        return None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise DraftError(f"{path} is damaged ({error}); delete it to start anew") from None


def expected_rates(manifest: DraftManifest) -> list[float]:
    """Conditional acceptance by position to begin with; empty where nothing is known."""
    if manifest.origin == "untrained":
        return [0.0] * MOST_DRAFTS
    return [min(1.0, max(0.0, rate)) for rate in manifest.heldout_rates]
