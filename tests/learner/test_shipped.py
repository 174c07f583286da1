"""What comes with the package is small, whole, and says where it comes from."""

from __future__ import annotations

import hashlib
import json

import pytest
from safetensors import safe_open

from learner.shipped import shipped_draft, shipped_drafts
from rlcore.weights import CONFIG, WEIGHTS

LARGEST = 25_000_000

SHIPPED = sorted(shipped_drafts().values())


def test_a_drafter_is_shipped():
    assert len(SHIPPED) >= 1
    assert shipped_draft("another-model", "eagle3") is None


@pytest.mark.parametrize("folder", SHIPPED, ids=lambda folder: folder.name)
def test_a_shipped_drafter_is_small_whole_and_has_a_card(folder):
    ((target_id, method),) = [key for key, found in shipped_drafts().items() if found == folder]
    assert method == "eagle3"
    assert sum(path.stat().st_size for path in folder.iterdir()) <= LARGEST
    manifest = json.loads((folder / "manifest.json").read_text())
    assert manifest["sha256"] == hashlib.sha256((folder / WEIGHTS).read_bytes()).hexdigest()
    assert manifest["origin"] == "shipped"
    assert manifest["heldout_length"] > 1.4
    config = json.loads((folder / CONFIG).read_text())
    with safe_open(folder / WEIGHTS, "pt") as file:
        assert file.get_slice("d2t").get_shape() == [config["draft_vocab_size"]]
    card = (folder / "CARD.md").read_text()
    assert target_id in card
    assert "clients.selfplay.drafter" in card
