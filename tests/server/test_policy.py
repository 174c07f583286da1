"""Which policy is live: only a greater version of a fitting checkpoint that the engine took."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient
from hypothesis import given
from hypothesis import strategies as st

from rlcore.weights import ADAPTER_CONFIG, ADAPTER_WEIGHTS, WEIGHTS, WeightError
from server import routes
from server.access import Access, Gate
from server.policy import EngineGone, Policy, PolicyError, check_folder
from server.quotas import Quotas

CONFIG = {
    "model_type": "llama", "hidden_size": 8, "dtype": "bfloat16", "eos_token_id": 2,
    "transformers_version": "4",
}  # fmt: skip
REPORT = {
    "stall_seconds": 0.5, "apply_seconds": 0.3, "stage_seconds": 2.0, "frozen_requests": 3,
    "frozen_tokens": 70,
}  # fmt: skip
SHA = "0" * 64


def checkpoint(folder: Path, weights: bool = True, **changes: Any) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CONFIG | changes))
    if weights:
        (folder / WEIGHTS).touch()
    return folder


class Engine:
    def __init__(self) -> None:
        self.swapped: list[int] = []
        self.fault: Exception | None = None
        self.hold = asyncio.Event()
        self.hold.set()

    async def swap(self, folder: str, sha256: str, version: int) -> dict[str, Any]:
        await self.hold.wait()
        if self.fault is not None:
            raise self.fault
        self.swapped.append(version)
        return dict(REPORT)


def made(root: Path) -> tuple[Policy, Engine]:
    policy, engine = Policy(checkpoint(root / "target"), 0), Engine()
    policy.connect(engine.swap)
    return policy, engine


def test_a_version_goes_live_with_what_it_cost(tmp_path):
    policy, engine = made(tmp_path)
    told: list[int] = []
    policy.on_change.append(lambda: told.append(policy.live))
    folder = checkpoint(tmp_path / "new", dtype="float32", transformers_version="5", eos_token_id=3)
    swap = asyncio.run(policy.publish(folder, 4, SHA))
    assert engine.swapped == told == [4]
    assert (policy.live, policy.folder, policy.sha256) == (4, folder, SHA)
    assert (swap.stall_seconds, swap.frozen_tokens) == (0.5, 70)
    assert list(policy.swaps) == [swap]
    assert (policy.count, policy.stall_seconds, policy.failed) == (1, 0.5, {})


@pytest.mark.parametrize(
    ("reason", "words", "change"),
    [
        ("config", "hidden_size", {"hidden_size": 16}),
        ("config", "model_type", {"model_type": "qwen2"}),
        ("unreadable", WEIGHTS, {"weights": False}),
    ],
)
def test_a_checkpoint_of_another_model_is_refused_before_the_engine_hears_of_it(
    reason, words, change, tmp_path
):
    policy, engine = made(tmp_path)
    with pytest.raises(PolicyError, match=words):
        asyncio.run(policy.publish(checkpoint(tmp_path / "new", **change), 1, SHA))
    assert (policy.live, engine.swapped, policy.failed) == (0, [], {reason: 1})


def test_a_config_that_cannot_be_read_is_refused(tmp_path):
    target = checkpoint(tmp_path / "target")
    bad = checkpoint(tmp_path / "bad")
    for content in (b"{", b"[]", b"\xff", b"[" * 100_000):
        (bad / "config.json").write_bytes(content)
        with pytest.raises(WeightError, match=r"config\.json"):
            check_folder(bad, target)
    with pytest.raises(WeightError, match="absolute"):
        check_folder(Path("new"), target)


def test_what_the_engine_refuses_is_counted_and_the_old_version_stays(tmp_path):
    policy, engine = made(tmp_path)
    new = checkpoint(tmp_path / "new")
    engine.fault = WeightError("not_finite", "norm holds NaN")
    with pytest.raises(PolicyError, match="version 1 was refused: not_finite: norm holds NaN"):
        asyncio.run(policy.publish(new, 1, SHA))
    engine.fault = RuntimeError("dead")
    with pytest.raises(PolicyError, match="could not be asked: dead"):
        asyncio.run(policy.publish(new, 1, SHA))
    assert (policy.live, policy.failed) == (0, {"not_finite": 1, "engine": 1})
    engine.fault = None
    asyncio.run(policy.publish(new, 1, SHA))
    assert policy.live == 1


def test_two_at_once_are_one_and_a_refusal(tmp_path):
    policy, engine = made(tmp_path)
    new = checkpoint(tmp_path / "new")

    async def both() -> None:
        engine.hold.clear()
        first = asyncio.ensure_future(policy.publish(new, 1, SHA))
        await asyncio.sleep(0)
        with pytest.raises(PolicyError, match="another version"):
            await policy.publish(new, 2, SHA)
        engine.hold.set()
        await first

    asyncio.run(both())
    assert (policy.live, policy.failed) == (1, {"busy": 1})


@given(st.lists(st.integers(0, 9), max_size=12))
def test_the_live_version_only_grows(versions):
    policy, engine = Policy(Path("/target"), 0), Engine()
    policy.connect(engine.swap)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("server.policy.check_folder", lambda *_: None)
        for version in versions:
            publication = policy.publish(Path("/new"), version, SHA)
            if version > policy.live:
                asyncio.run(publication)
            else:
                with pytest.raises(PolicyError, match=f"version {policy.live} is live"):
                    asyncio.run(publication)
    assert engine.swapped == sorted(set(engine.swapped))
    assert policy.live == max([0, *versions])


@pytest.mark.parametrize(
    ("client", "guarded", "status"),
    [("127.0.0.1", False, 200), ("10.1.2.3", False, 403), ("10.1.2.3", True, 200)],
)
def test_without_a_key_only_this_machine_changes_the_policy(client, guarded, status, tmp_path):
    policy, _ = made(tmp_path)
    app = FastAPI()
    app.include_router(routes.router)
    app.state.paceline = type("State", (), {"policy": policy})
    app = Access(app, Gate(api_key="key" if guarded else None), Quotas())
    headers = {"authorization": "Bearer key"} if guarded else {}
    http = TestClient(app, "http://localhost", client=(client, 5), headers=headers)
    body = {"folder": str(checkpoint(tmp_path / "new")), "version": 3, "sha256": SHA}
    answer = http.post("/v1/paceline/policy", json=body)
    assert answer.status_code == status
    assert (policy.live, policy.count) == ((3, 1) if status == 200 else (0, 0))
    if status == 200:
        live = http.get("/v1/paceline/policy").json()
        assert (live["live"], len(live["swaps"])) == (3, 1)
        assert answer.json()["stall_seconds"] == 0.5
        again = http.post("/v1/paceline/policy", json=body)
        assert again.status_code == 409
        assert "version 3 is live" in again.json()["detail"]
        assert http.post("/v1/paceline/policy", json=body | {"x": 1}).status_code == 422


def test_a_new_engine_is_brought_to_the_version_that_was_live(tmp_path):
    policy, _ = made(tmp_path)
    changes: list[int] = []
    policy.on_change.append(lambda: changes.append(policy.live))

    async def run() -> None:
        again = Engine()
        await policy.restore(again.swap)
        assert again.swapped == []  # its own target is what was live
        await policy.publish(checkpoint(tmp_path / "new"), 3, SHA)
        policy.disconnect()
        with pytest.raises(EngineGone):
            await policy.publish(tmp_path / "new", 4, SHA)
        await policy.restore(again.swap)
        assert again.swapped == [3]
        assert (policy.live, policy.folder, policy.count) == (3, tmp_path / "new", 1)

    asyncio.run(run())
    assert changes == [3]


def test_where_the_live_checkpoint_is_gone_the_servers_own_target_is_live_and_counts_on(tmp_path):
    policy, _ = made(tmp_path)
    changes: list[int] = []
    policy.on_change.append(lambda: changes.append(policy.live))

    async def run() -> None:
        await policy.publish(checkpoint(tmp_path / "new"), 3, SHA)
        again = Engine()
        again.fault = WeightError("unreadable", "it is gone")
        await policy.restore(again.swap)
        assert (policy.live, policy.folder, policy.sha256) == (0, tmp_path / "target", "")
        assert policy.failed == {"unreadable": 1}
        again.fault = None
        policy.connect(again.swap)
        await policy.publish(tmp_path / "new", 4, SHA)
        assert policy.live == 4

    asyncio.run(run())
    assert changes == [3, 0, 4]


def adapter(folder: Path) -> Path:
    folder.mkdir()
    (folder / ADAPTER_CONFIG).write_text("{}")
    (folder / ADAPTER_WEIGHTS).write_bytes(b"12345")
    return folder


def test_a_server_for_adapters_takes_those_and_keeps_the_targets_embedding(tmp_path):
    target = checkpoint(tmp_path / "target")
    policy, engine = Policy(target, 0, adapters=True), Engine()
    policy.connect(engine.swap)
    folder = adapter(tmp_path / "new")
    swap = asyncio.run(policy.publish(folder, 2, SHA))
    assert engine.swapped == [2]
    assert (swap.adapter, swap.nbytes) == (True, 5)
    assert (policy.folder, policy.checkpoint) == (folder, target)


@pytest.mark.parametrize(
    ("adapters", "words"), [(True, "a whole checkpoint"), (False, "a LoRA adapter")]
)
def test_a_version_of_the_other_kind_is_refused_with_what_to_do(tmp_path, adapters, words):
    policy, engine = Policy(checkpoint(tmp_path / "target"), 0, adapters=adapters), Engine()
    policy.connect(engine.swap)
    folder = checkpoint(tmp_path / "new") if adapters else adapter(tmp_path / "new")
    with pytest.raises(PolicyError, match=words) as caught:
        asyncio.run(policy.publish(folder, 1, SHA))
    assert "--policy-lora-rank" in str(caught.value)
    assert policy.failed == {"kind": 1}
    assert engine.swapped == []


def test_an_adapter_without_its_weights_is_refused(tmp_path):
    policy, engine = Policy(checkpoint(tmp_path / "target"), 0, adapters=True), Engine()
    policy.connect(engine.swap)
    folder = adapter(tmp_path / "new")
    (folder / ADAPTER_WEIGHTS).unlink()
    with pytest.raises(PolicyError, match=f"holds no {ADAPTER_WEIGHTS}"):
        asyncio.run(policy.publish(folder, 1, SHA))
