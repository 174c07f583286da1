"""The weight store: versioned folders of safetensors and a manifest, written once, checked on read.

``<root>/<version>/`` holds ``model.safetensors``, ``config.json`` and ``manifest.json``; a version that
is a LoRA adapter has peft's names for the first two. A folder appears by one atomic rename, so whoever
sees it sees it whole. Drafters and policies are kept by the same store.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import shutil
import struct
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Generic, TypeVar

import msgspec
import numpy as np
import torch
from safetensors.torch import save

from rlcore.errors import PacelineError
from rlcore.records.versions import DraftManifest, PolicyManifest

WEIGHTS = "model.safetensors"
CONFIG = "config.json"
MANIFEST = "manifest.json"
FILES = (WEIGHTS, CONFIG, MANIFEST)

ADAPTER_WEIGHTS = "adapter_model.safetensors"
ADAPTER_CONFIG = "adapter_config.json"
"""What peft calls them; a folder with this one holds a LoRA adapter."""

MAX_WEIGHT_BYTES = 64 * 1024**3


class WeightError(PacelineError, ValueError):
    """Weights that must not be used. ``reason`` is a short word, used as a metric label."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(f"{reason}: {detail}")
        self.reason = reason


Signature = dict[str, tuple[str, tuple[int, ...]]]
"""Tensor name -> (safetensors dtype, shape)."""


DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8,
    "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip
"""Of safetensors; those that a served model has."""


class _Entry(msgspec.Struct):
    dtype: str
    shape: tuple[Annotated[int, msgspec.Meta(ge=0)], ...]
    data_offsets: tuple[int, int]
    """Where its bytes are, behind the header."""


def signature(header: bytes) -> Signature:
    """Names, dtypes and shapes out of the start of a safetensors file, no tensor being read.

    Raises WeightError when the bytes are not the start of a safetensors file.
    """
    _, entries = _entries(header)
    return {name: (entry.dtype, entry.shape) for name, entry in entries.items()}


def _entries(header: bytes) -> tuple[int, dict[str, _Entry]]:
    """Where the tensors' bytes begin, and the header's entries."""
    try:
        (length,) = struct.unpack("<Q", header[:8])
        if length > len(header) - 8:
            raise WeightError("truncated", f"header of {length} bytes, {len(header) - 8} are there")
        entries = msgspec.json.decode(header[8 : 8 + length], type=dict[str, msgspec.Raw])
        entries.pop("__metadata__", None)
        return 8 + length, {
            name: msgspec.json.decode(raw, type=_Entry) for name, raw in entries.items()
        }
    except (struct.error, msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise WeightError("malformed", f"not a safetensors file ({error})") from None


def digest_of(path: Path) -> str:
    """sha256 of a weights file; raises WeightError when it cannot be read."""
    try:
        with open(path, "rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise WeightError("unreadable", f"{path}: {error.strerror}") from None


def check_signature(got: Signature, want: Signature) -> None:
    """Raises WeightError unless both name the same tensors with the same shapes and dtypes."""
    check_shapes(
        {name: shape for name, (_, shape) in got.items()},
        {name: shape for name, (_, shape) in want.items()},
    )
    for name, entry in want.items():
        if got[name] != entry:
            raise WeightError("shape", f"{name} is {got[name]}, the live weights have {entry}")


def check_shapes(got: Mapping[str, tuple[int, ...]], want: Mapping[str, tuple[int, ...]]) -> None:
    """Raises WeightError unless both name the same tensors with the same shapes."""
    if missing := sorted(want.keys() - got.keys()):
        raise WeightError("shape", f"tensors missing: {', '.join(missing[:4])}")
    if extra := sorted(got.keys() - want.keys()):
        raise WeightError("shape", f"unexpected tensors: {', '.join(extra[:4])}")
    for name, shape in want.items():
        if got[name] != shape:
            raise WeightError("shape", f"{name} is {got[name]}, the live weights have {shape}")


def check_finite(tensors: Mapping[str, torch.Tensor]) -> None:
    """Raises WeightError when a tensor holds NaN or infinity."""
    for name, tensor in tensors.items():
        if not tensor.is_floating_point() or tensor.numel() == 0:
            continue
        # One pass and no copy; NaN wins over every number in both.
        if not all(math.isfinite(value) for value in torch.aminmax(tensor)):
            raise WeightError("not_finite", f"{name} holds NaN or infinity")


def read_checked(path: Path, sha256: str) -> tuple[Signature, dict[str, torch.Tensor]]:
    """Read a weights file once and check those very bytes: digest, form, finiteness.

    The tensors are views of what was read. A thread may do this beside others that compute: all that
    takes long is done without Python's lock. Raises WeightError; a missing or unreadable file is one too.
    """
    try:
        with open(path, "rb", buffering=0) as file:
            size = os.fstat(file.fileno()).st_size
            if size > MAX_WEIGHT_BYTES:
                raise WeightError("oversized", f"{path} has {size} bytes")
            content = np.empty(size, np.uint8)
            read = 0
            while count := file.readinto(content.data[read:]):
                read += count
    except OSError as error:
        raise WeightError("unreadable", f"{path}: {error.strerror}") from None
    if hashlib.sha256(content.data).hexdigest() != sha256:
        raise WeightError("digest", f"{path} is not the file its manifest names")
    length = int.from_bytes(content[:8].tobytes(), "little")
    begin, entries = _entries(content[: 8 + min(length, size)].tobytes())
    data = torch.from_numpy(content)[begin:]
    tensors = {name: _view(name, data, entry) for name, entry in entries.items()}
    check_finite(tensors)
    return {name: (entry.dtype, entry.shape) for name, entry in entries.items()}, tensors


def _view(name: str, data: torch.Tensor, entry: _Entry) -> torch.Tensor:
    """Raises WeightError when the entry does not say where exactly its bytes are."""
    dtype = DTYPES.get(entry.dtype)
    if dtype is None:
        raise WeightError("malformed", f"{name} has dtype {entry.dtype!r}")
    start, end = entry.data_offsets
    if not 0 <= start <= end <= len(data) or end - start != math.prod(entry.shape) * dtype.itemsize:
        raise WeightError("malformed", f"{name}: bytes {start} to {end} of {len(data)}")
    part = data[start:end]
    if part.storage_offset() % dtype.itemsize:  # a header that does not end on a multiple of eight
        part = part.clone()
    return part.view(dtype).view(entry.shape)


M = TypeVar("M", DraftManifest, PolicyManifest)


@dataclass(frozen=True)
class VersionStore(Generic[M]):
    """Versions under one folder. Safe for one writer and many readers."""

    root: Path
    manifest_type: type[M]
    weights_name: str = WEIGHTS
    config_name: str = CONFIG

    @property
    def names(self) -> tuple[str, str, str]:
        """Of the files of a version."""
        return self.weights_name, self.config_name, MANIFEST

    def folder(self, version: int) -> Path:
        return self.root / f"{version:06d}"

    def versions(self) -> list[int]:
        """All whole versions, ascending."""
        if not self.root.is_dir():
            return []
        return sorted(
            int(p.name)
            for p in self.root.iterdir()
            if p.name.isdigit() and (p / MANIFEST).is_file()
        )

    def manifest(self, version: int) -> M:
        """Raises WeightError when there is no such version or its manifest cannot be read."""
        try:
            content = (self.folder(version) / MANIFEST).read_bytes()
            return msgspec.json.decode(content, type=self.manifest_type)
        except OSError:
            raise WeightError("unknown_version", f"there is no version {version}") from None
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise WeightError("malformed", f"manifest of version {version}: {error}") from None

    def holds(self, version: int, sha256: str) -> bool:
        """Whether this version is here, with exactly these weights."""
        return version in self.versions() and self.manifest(version).sha256 == sha256

    def manifests(self) -> list[M]:
        return [self.manifest(version) for version in self.versions()]

    def publish(
        self,
        tensors: Mapping[str, torch.Tensor],
        config: Mapping[str, Any],
        manifest: M,
    ) -> M:
        """Write a version and give back its manifest, with digest and time filled in."""
        content = save({name: t.detach().contiguous() for name, t in tensors.items()})
        manifest = msgspec.structs.replace(
            manifest,
            sha256=hashlib.sha256(content).hexdigest(),
            created=manifest.created or time.time(),
        )
        config_bytes = json.dumps(config, indent=2).encode()
        self._put(manifest.version, content, config_bytes, msgspec.json.encode(manifest))
        return manifest

    def receive(self, version: int, files: Mapping[str, bytes | memoryview]) -> M:
        """Take a version sent by the other side, checked in full first; raises WeightError."""
        if set(files) != set(self.names):
            raise WeightError("files", f"got {sorted(files)}, a version is {sorted(self.names)}")
        try:
            manifest = msgspec.json.decode(files[MANIFEST], type=self.manifest_type)
            msgspec.json.decode(files[self.config_name], type=dict[str, Any])
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise WeightError("malformed", str(error)) from None
        if manifest.version != version:
            raise WeightError("version", f"asked for {version}, got {manifest.version}")
        content = bytes(files[self.weights_name])
        if hashlib.sha256(content).hexdigest() != manifest.sha256:
            raise WeightError(
                "digest", f"weights of version {version} are not what its manifest names"
            )
        signature(content)
        self._put(version, content, bytes(files[self.config_name]), bytes(files[MANIFEST]))
        return manifest

    def files(self, version: int) -> dict[str, bytes]:
        """The files of a version, to send; raises WeightError."""
        try:
            return {name: (self.folder(version) / name).read_bytes() for name in self.names}
        except OSError as error:
            raise WeightError("unreadable", f"version {version}: {error.strerror}") from None

    def remove(self, version: int) -> None:
        shutil.rmtree(self.folder(version), ignore_errors=True)

    def _put(self, version: int, weights: bytes, config: bytes, manifest: bytes) -> None:
        self.root.mkdir(parents=True, exist_ok=True)
        partial = self.root / f".{version:06d}.{os.getpid()}"
        shutil.rmtree(partial, ignore_errors=True)
        try:
            partial.mkdir()
            for name, content in zip(self.names, (weights, config, manifest), strict=True):
                with open(partial / name, "wb") as file:
                    file.write(content)
                    file.flush()
                    os.fsync(file.fileno())
            shutil.rmtree(self.folder(version), ignore_errors=True)
            partial.rename(self.folder(version))
        except OSError as error:
            shutil.rmtree(partial, ignore_errors=True)
            raise WeightError("unwritable", f"{self.root}: {error.strerror}") from None


class WeightStore(VersionStore[DraftManifest]):
    """The drafts of one target."""

    def __init__(self, root: Path) -> None:
        super().__init__(root, DraftManifest)


class PolicyStore(VersionStore[PolicyManifest]):
    """The policies of one run. ``adapters``: they are LoRA adapters, and not whole checkpoints."""

    def __init__(self, root: Path, *, adapters: bool = False) -> None:
        names = (ADAPTER_WEIGHTS, ADAPTER_CONFIG) if adapters else (WEIGHTS, CONFIG)
        super().__init__(root, PolicyManifest, *names)
