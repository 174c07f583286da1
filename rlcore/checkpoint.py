"""Checkpoints: tensors as safetensors, everything else as JSON, replaced by one atomic rename."""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

TENSORS = "state.safetensors"
FACTS = "state.json"


class CheckpointError(ValueError):
    """A checkpoint that cannot be read."""


def save_checkpoint(
    folder: Path, tensors: Mapping[str, torch.Tensor], facts: Mapping[str, Any]
) -> None:
    """Write a checkpoint over the one before; raises OSError and leaves the old one then."""
    partial = folder.with_name(f".{folder.name}.{os.getpid()}")
    shutil.rmtree(partial, ignore_errors=True)
    try:
        partial.mkdir(parents=True)
        save_file({name: _whole(t.detach()) for name, t in tensors.items()}, partial / TENSORS)
        (partial / FACTS).write_text(json.dumps(facts))
        old = folder.with_name(f".{folder.name}.old")
        shutil.rmtree(old, ignore_errors=True)
        if folder.exists():
            folder.rename(old)
        partial.rename(folder)
        shutil.rmtree(old, ignore_errors=True)
    except SafetensorError as error:
        # What the disk says while tensors are written comes as this.
        raise OSError(errno.EIO, str(error)) from None
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    """Contiguous and with a storage of its own, as safetensors wants it; copied only if need be."""
    tensor = tensor.contiguous()
    own = tensor.untyped_storage().nbytes() == tensor.nbytes
    return tensor if own else tensor.clone()


def load_checkpoint(folder: Path) -> tuple[dict[str, torch.Tensor], dict[str, Any]] | None:
    """None when there is none; raises CheckpointError when it is damaged."""
    if not folder.exists():
        old = folder.with_name(f".{folder.name}.old")
        if not old.exists():
            return None
        folder = old  # a crash between the two renames
    try:
        return load_file(folder / TENSORS), json.loads((folder / FACTS).read_text())
    except (OSError, ValueError, SafetensorError) as error:
        raise CheckpointError(f"{folder}: {error}") from None
