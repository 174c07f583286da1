"""A target or given drafter as a local folder, and a name that tells its weights from others."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path
from typing import TYPE_CHECKING

from rlcore.errors import PacelineError
from rlcore.home import Home
from rlcore.models import resolve_target

if TYPE_CHECKING:
    from torch import Tensor

SHARED_WITH_DRAFTERS = {
    "embedding": "model.embed_tokens.weight",
    "final_norm": "model.norm.weight",
    "lm_head": "lm_head.weight",
}
"""What a learner needs of a target, and its name in a checkpoint; a tied head is not in one."""


class TargetError(PacelineError):
    """A model that cannot be used."""


def local_model(name: str, home: Home) -> Path:
    """The folder of a model: embedded, local, or fetched from the Hugging Face hub.

    Raises PacelineError with one line that says what to do.
    """
    resolved = resolve_target(name, home)
    if isinstance(resolved, Path):
        return resolved
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(
            snapshot_download(
                resolved, allow_patterns=["*.json", "*.safetensors", "*.jinja", "*.model"]
            )
        )
    except HFValidationError:
        raise TargetError(
            f"unknown model {name!r}: give 'embedded', a folder, or a Hugging Face id like org/name"
        ) from None
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        cause = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise TargetError(
            f"model {name!r} cannot be fetched from the Hugging Face hub ({cause}); "
            "check the name and the network, or give a local folder"
        ) from None


def model_identity(folder: Path) -> str:
    """A short name for these weights: the folder's name and a digest of what it holds.

    The digest covers config.json, and of each weight file its size, header and first megabyte: enough
    to tell models apart without reading gigabytes.
    """
    digest = hashlib.blake2b(digest_size=6)
    digest.update((folder / "config.json").read_bytes())
    for path in sorted(folder.glob("*.safetensors")):
        digest.update(f"{path.name}:{path.stat().st_size}".encode())
        with open(path, "rb") as file:
            digest.update(file.read(1 << 20))
    label = re.sub(r"[^A-Za-z0-9.]+", "-", folder.name).strip("-")[:48]
    return f"{label}-{digest.hexdigest()}"


def shared_with_drafters(folder: Path) -> dict[str, Tensor]:
    """Those tensors of a checkpoint of one file, as stored. Raises TargetError."""
    from safetensors import SafetensorError, safe_open

    from rlcore.weights import WEIGHTS

    try:
        with safe_open(folder / WEIGHTS, "pt") as file:
            kept = set(file.keys())
            return {
                name: file.get_tensor(stored)
                for name, stored in SHARED_WITH_DRAFTERS.items()
                if stored in kept
            }
    except (OSError, SafetensorError) as error:
        raise TargetError(f"{folder / WEIGHTS} cannot be read: {error}") from None
