"""What a server starts from: made or imported once, and never in the way of what was promoted."""

from __future__ import annotations

import json

import pytest
import torch

from learner.drafters.eagle3 import Eagle3
from learner.first_draft import ensure_draft
from learner.target import Target
from rlcore.home import Home
from rlcore.records.versions import DraftManifest
from rlcore.weights import WeightStore
from tests.learner.tiny import make_target


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    folder = tmp_path_factory.mktemp("target")
    make_target(folder)
    return Target.open(folder)


def live(store: WeightStore) -> int:
    return json.loads((store.root / "live.json").read_text())["live"]


def ensure(store: WeightStore, target: Target, draft: str = "none") -> None:
    ensure_draft(store, target, "t-1", "eagle3", draft, 40, Home(store.root))


def test_an_untrained_head_is_made_once(tmp_path, target):
    store = WeightStore(tmp_path)
    ensure(store, target)
    ensure(store, target)
    assert store.versions() == [live(store)] == [0]
    assert store.manifest(0).origin == "untrained"


@pytest.mark.parametrize("given", [False, True])
def test_a_restart_serves_what_was_promoted_since(tmp_path, target, given):
    store, draft = WeightStore(tmp_path / "store"), "none"
    if given:
        draft = str(tmp_path / "draft")
        Eagle3.build(target, vocab_size=40, seed=5).save(draft, torch.float32)
    ensure(store, target, draft)
    store.receive(1, changed(store.files(0)))
    (store.root / "live.json").write_text('{"live": 1, "previous": 0}')
    ensure(store, target, draft)
    assert json.loads((store.root / "live.json").read_text()) == {"live": 1, "previous": 0}
    assert store.versions() == [0, 1]


def changed(files: dict[str, bytes]) -> dict[str, bytes]:
    manifest = json.loads(files["manifest.json"]) | {"version": 1, "parent": 0}
    return {**files, "manifest.json": json.dumps(manifest).encode()}


def test_another_given_draft_takes_over(tmp_path, target):
    store = WeightStore(tmp_path / "store")
    for seed in (1, 2):
        folder = tmp_path / f"draft{seed}"
        Eagle3.build(target, vocab_size=40, seed=seed).save(folder, torch.float32)
        ensure(store, target, str(folder))
        assert live(store) == seed - 1
        assert store.manifest(seed - 1).origin == "given"


def test_what_was_measured_of_a_given_draft_goes_on_with_it(tmp_path, target):
    store = WeightStore(tmp_path / "made")
    tensors, config = Eagle3.build(target, vocab_size=40, seed=5).export(torch.float32)
    measured = DraftManifest(
        version=7, parent=6, method="eagle3", sha256="", target_id="t-1", target_version=0,
        origin="learned", tokens_seen=900, heldout_tokens=500, heldout_length=1.7,
        heldout_rates=(0.5, 0.4, 0.3),
    )  # fmt: skip
    store.publish(tensors, config, measured)
    into = WeightStore(tmp_path / "store")
    ensure(into, target, str(store.folder(7)))
    found = into.manifest(0)
    assert (found.origin, found.version, found.parent) == ("given", 0, None)
    assert found.heldout_rates == (0.5, 0.4, 0.3)
    assert (found.heldout_length, found.tokens_seen) == (1.7, 900)


def test_a_draft_for_another_target_is_refused(tmp_path, target):
    store = WeightStore(tmp_path / "made")
    tensors, config = Eagle3.build(target, vocab_size=40, seed=5).export(torch.float32)
    other = DraftManifest(
        version=1, parent=None, method="eagle3", sha256="", target_id="t-2", target_version=0,
        origin="learned",
    )  # fmt: skip
    store.publish(tensors, config, other)
    with pytest.raises(ValueError, match="a draft for t-2, not for t-1"):
        ensure(WeightStore(tmp_path / "store"), target, str(store.folder(1)))
