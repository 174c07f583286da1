"""Weights that must not go live are refused and counted; the old drafter serves on."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
import torch
from safetensors.torch import load_file, save

from rlcore.records.versions import DraftManifest
from rlcore.weights import WEIGHTS
from tests.conftest import Served
from tests.e2e.tap import version_files

pytestmark = pytest.mark.slow


def greedy(served: Served) -> str:
    answer = served.openai.completions.create(
        model=served.model, prompt="The sea is", max_tokens=12, temperature=0.0
    )
    return answer.choices[0].text


def failed_swaps(served: Served) -> dict[str, float]:
    found = {}
    for line in served.server.get("/metrics").text.splitlines():
        if line.startswith("paceline_failed_swaps_total{"):
            found[line.split('"')[1]] = float(line.rsplit(" ", 1)[1])
    return found


def store_version(served: Served, kind: str) -> tuple[int, str, str]:
    """Put a bad version into the server's store: (version, reason it is counted by, word of why)."""
    store = served.store
    version = store.versions()[-1] + 1
    live = served.server.status()["draft"]["live"]
    manifest = msgspec.structs.replace(store.manifest(live), version=version, parent=live)
    tensors = load_file(store.folder(live) / WEIGHTS)
    config = json.loads((store.folder(live) / "config.json").read_text())
    reason, word = kind, "refused"
    if kind == "not_finite":
        tensors["fc.weight"][3, 4] = torch.nan
        word = "fc.weight"
    elif kind == "shape":
        tensors["fc.weight"] = tensors["fc.weight"][:, :-1].contiguous()
        word = "fc.weight"
    elif kind == "missing":
        del tensors["norm.weight"]
        reason, word = "shape", "norm.weight"
    elif kind == "target":
        manifest = msgspec.structs.replace(manifest, target_id="another-model")
        word = "another-model"
    store.publish(tensors, config, manifest)
    path = store.folder(version) / WEIGHTS
    if kind == "truncated":
        path.write_bytes(path.read_bytes()[:100])
    elif kind == "digest":
        content = bytearray(path.read_bytes())
        content[-1000] ^= 1
        path.write_bytes(content)
    elif kind == "cut":
        path.write_bytes(path.read_bytes()[:-1000])
        reason = "digest"
    return version, reason, word


def served_draft(status: dict[str, Any]) -> dict[str, Any]:
    """What is live; whether its drafts are accepted is another thing, and may show in between."""
    return {name: value for name, value in status["draft"].items() if name != "collapsed"}


@pytest.mark.on_server("eagle3")
@pytest.mark.parametrize(
    "kind", ["truncated", "cut", "digest", "not_finite", "shape", "missing", "target"]
)
def test_a_bad_version_is_refused_counted_and_the_old_one_serves_on(
    served: Served, kind: str
) -> None:
    before, text, counted = served.server.status(), greedy(served), failed_swaps(served)
    version, reason, word = store_version(served, kind)
    answer = served.server.post(f"/v1/paceline/drafts/{version}/activate")
    assert answer.status_code == 409
    message = answer.json()["error"]["message"]
    assert f"version {version} was refused" in message
    assert word in message
    after = failed_swaps(served)
    assert after.pop(reason) == counted.pop(reason, 0) + 1
    assert after == counted
    assert served_draft(served.server.status()) == served_draft(before)
    assert greedy(served) == text


@pytest.mark.on_server("eagle3")
def test_an_unknown_version_is_not_found(served: Served) -> None:
    assert served.server.post("/v1/paceline/drafts/99999/activate").status_code == 404
    assert served.server.post("/v1/paceline/drafts/one/activate").status_code == 400


@pytest.mark.on_server("eagle3")
def test_an_announced_version_goes_live_only_if_its_files_are_good(served: Served) -> None:
    text = greedy(served)
    live = served.server.status()["draft"]["live"]
    top = served.store.versions()[-1]
    manifest, files = version_files(served.store.folder(live), version=top + 1, parent=live)

    tampered = bytearray(files[WEIGHTS])
    tampered[-1000] ^= 1
    for bad in (
        {**files, WEIGHTS: bytes(tampered)},
        {**files, WEIGHTS: files[WEIGHTS][:1000]},
        {**files, "config.json": b"{"},
        {**files, "manifest.json": b"[]"},
    ):
        verdict = served.tap.announce(manifest, bad)
        assert not verdict.live
        assert verdict.error
        assert verdict.live_version == live
        assert top + 1 not in served.store.versions()

    tensors = load_file(served.store.folder(live) / WEIGHTS)
    tensors["midlayer.mlp.up_proj.weight"] *= 1.01
    content = save(tensors)
    verdict = served.tap.announce(manifest, {**files, WEIGHTS: content})
    assert not verdict.live  # the manifest still names the old digest
    good, good_files = with_weights(served, top + 2, live, content)
    assert served.tap.announce(good, good_files).live
    status = served.server.status()["draft"]
    assert (status["live"], status["previous"]) == (top + 2, live)
    assert greedy(served) == text
    assert served.server.post("/v1/paceline/drafts/rollback").json()["live"] == live
    assert greedy(served) == text


def with_weights(
    served: Served, version: int, parent: int, content: bytes
) -> tuple[DraftManifest, dict[str, bytes]]:
    import hashlib

    manifest, files = version_files(
        served.store.folder(parent), version=version, parent=parent, origin="learned",
        sha256=hashlib.sha256(content).hexdigest(),
    )  # fmt: skip
    return manifest, {**files, WEIGHTS: content}
