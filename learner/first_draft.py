"""Makes sure a store holds a live draft: the shipped one, an untrained one, or one the user gave.

Run by ``serve`` as a process of its own (``python -m learner.first_draft``). The last line on standard
output says what is wrong when the exit code is not 0.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import msgspec
import torch

from learner.drafters.registry import DRAFTERS
from learner.shipped import shipped_draft
from learner.target import Target
from rlcore.errors import PacelineError
from rlcore.home import Home
from rlcore.records.versions import DraftManifest
from rlcore.target import local_model
from rlcore.weights import MANIFEST, WeightError, WeightStore, check_finite


def ensure_draft(
    store: WeightStore,
    target: Target,
    target_id: str,
    method: str,
    draft: str,
    draft_vocab: int,
    home: Home,
) -> None:
    """Make or import the version that is to be live, and write it down, if need be.

    Raises PacelineError, ValueError (a draft that does not fit) or WeightError.
    """
    live_file = store.root / "live.json"
    versions = store.versions()
    if versions and live_file.exists() and draft in ("auto", "none"):
        return
    measured: DraftManifest | None = None
    shipped = shipped_draft(target_id, method) if draft == "auto" else None
    if shipped is None and draft in ("auto", "none"):
        drafter = DRAFTERS[method].build(target, vocab_size=draft_vocab)
        origin = "untrained"
    else:
        folder = local_model(draft, home) if shipped is None else shipped
        measured = _known_manifest(folder)
        if measured is not None and measured.target_id != target_id:
            raise ValueError(
                f"{folder} is a draft for {measured.target_id}, not for {target_id}; "
                "give the matching --target, or --draft none"
            )
        drafter = DRAFTERS[method].load(folder, target)
        origin = "given" if shipped is None else "shipped"
    tensors, config = drafter.export(serving_dtype(target))
    check_finite(tensors)
    manifest = DraftManifest(
        version=max(versions, default=-1) + 1,
        parent=None,
        method=method,
        sha256="",
        target_id=target_id,
        target_version=0,
        origin=origin,
        tokens_seen=0 if measured is None else measured.tokens_seen,
        heldout_tokens=0 if measured is None else measured.heldout_tokens,
        heldout_length=None if measured is None else measured.heldout_length,
        heldout_rates=() if measured is None else measured.heldout_rates,
    )
    version = _same_weights(store, versions, tensors, config, manifest)
    if version is not None and live_file.exists():
        return  # imported by an earlier start: what was promoted since stays live
    if version is None:
        version = store.publish(tensors, config, manifest).version
    live_file.write_text(json.dumps({"live": version, "previous": None}))


def serving_dtype(target: Target) -> torch.dtype:
    """What the engine loads the target in by default."""
    name = target.config.get("dtype") or target.config.get("torch_dtype") or "bfloat16"
    return torch.float32 if name == "float32" else torch.bfloat16


def _same_weights(store, versions, tensors, config, manifest) -> int | None:
    """An earlier import of these very weights, so that a restart imports nothing again."""
    if manifest.origin != "given":
        return None
    scratch = WeightStore(store.root / ".import")
    digest = scratch.publish(tensors, config, manifest).sha256
    scratch.remove(manifest.version)
    for version in versions:
        if store.manifest(version).sha256 == digest:
            return version
    return None


def _known_manifest(folder: Path) -> DraftManifest | None:
    """Ours, if there is one: what was measured of the draft goes on with it."""
    path = folder / MANIFEST
    if not path.exists():
        return None
    try:
        return msgspec.json.decode(path.read_bytes(), type=DraftManifest)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None  # some other tool's manifest


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m learner.first_draft")
    for flag in ("target", "target-id", "method", "draft", "store", "home"):
        parser.add_argument(f"--{flag}", required=True)
    parser.add_argument("--draft-vocab", type=int, required=True)
    args = parser.parse_args()
    try:
        ensure_draft(
            WeightStore(Path(args.store)),
            Target.open(args.target),
            args.target_id,
            args.method,
            args.draft,
            args.draft_vocab,
            Home(Path(args.home)),
        )
    except (PacelineError, WeightError, ValueError, KeyError, RuntimeError, OSError) as error:
        print(f"draft {args.draft!r} cannot be used: {' '.join(str(error).split())}")
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
