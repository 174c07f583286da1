"""A server begins with the drafter that comes with the package, and goes back to it from a worse one."""

from __future__ import annotations

import time

import msgspec
import pytest
import torch
from safetensors.torch import load_file

from rlcore.weights import WEIGHTS
from tests.conftest import Served
from tests.e2e.prompts import PROMPTS

pytestmark = pytest.mark.slow

FEWEST_TOKENS_A_STEP = 1.25
LONGEST_WATCH = 48
"""Requests in which a version without any use has to be found out."""


def ask(served: Served, prompt: str) -> None:
    served.openai.completions.create(
        model=served.model, prompt=prompt, max_tokens=48, temperature=0.0,
        extra_body={"ignore_eos": True},
    )  # fmt: skip


@pytest.mark.on_server("shipped")
def test_the_first_requests_are_drafted_for_by_the_shipped_drafter(served: Served) -> None:
    status = served.server.status()
    assert (status["draft"]["live"], status["draft"]["origin"]) == (0, "shipped")
    for prompt in PROMPTS[:8]:
        ask(served, prompt)
    live = served.server.status()["acceptance"]["live"]
    assert live["steps"] > 100
    assert live["length"] > FEWEST_TOKENS_A_STEP


@pytest.mark.on_server("shipped")
def test_a_version_that_is_bad_live_is_rolled_back_with_its_reason(served: Served) -> None:
    """Its manifest says that it won at the gate: only live traffic can tell."""
    server, store = served.server, served.store
    parent = server.status()["draft"]["live"]
    bad = max(store.versions()) + 1
    tensors = load_file(store.folder(parent) / WEIGHTS)
    for name, tensor in tensors.items():
        if tensor.ndim == 2:
            tensors[name] = torch.randn_like(tensor) * tensor.float().std()
    won = msgspec.structs.replace(
        store.manifest(parent), version=bad, parent=parent, origin="learned",
        heldout_length=2.5, parent_length=1.5, gain_lower=0.9,
    )  # fmt: skip
    config = msgspec.json.decode((store.folder(parent) / "config.json").read_bytes())
    store.publish(tensors, config, won)
    assert server.post(f"/v1/paceline/drafts/{bad}/activate").json()["live"] == bad
    for number in range(LONGEST_WATCH):
        ask(served, f"{number}. {PROMPTS[number % len(PROMPTS)]}")
        if server.status()["draft"]["live"] != bad:
            break
    # The order to go back can be on its way still.
    end = time.monotonic() + 30
    while server.status()["draft"]["live"] == bad:
        assert time.monotonic() < end, f"no rollback\n{server.tail()}"
        time.sleep(0.3)
    status = server.status()
    assert status["draft"]["live"] == parent
    assert status["rollbacks"]["count"] == 1
    change = server.get("/v1/paceline/history").json()["changes"][-1]
    assert (change["cause"], change["before"], change["version"]) == ("rolled_back", bad, parent)
    assert change["reason"]
    (entry,) = [draft for draft in server.drafts() if draft["version"] == bad]
    assert entry["rolled_back"] == change["reason"]
