"""Paceline's own routes, under /v1/paceline/."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
from fastapi import APIRouter, HTTPException, Request
from pydantic import BaseModel, ConfigDict, Field
from starlette.concurrency import run_in_threadpool

from rlcore.live_drafts import DraftError
from rlcore.records.versions import DraftManifest
from rlcore.weights import WeightError, WeightStore
from server.access import identity_of, require_admin, require_figures
from server.model_cores import CoresError, EngineAway
from server.policy import EngineGone, PolicyError
from server.status import ServerState, acceptance_view, cores_view, status, tenant_status

router = APIRouter(prefix="/v1/paceline", tags=["paceline"])


def _state(request: Request) -> ServerState:
    state: ServerState = request.app.state.paceline
    return state


@router.get("/status")
async def get_status(request: Request) -> dict[str, Any]:
    """Target and draft versions, acceptance, the learner's state, trace counters; a tenant's key is told
    the versions only."""
    if not identity_of(request).sees_all:
        return tenant_status(_state(request))
    return status(_state(request))


@router.get("/drafts")
async def get_drafts(request: Request) -> dict[str, Any]:
    """Every draft version on disk: its origin, its measures, and its live acceptance so far.

    ``damaged`` has those whose manifest cannot be read, and why.
    """
    require_figures(request)
    state = _state(request)
    acceptance = state.acceptance()
    rolled_back = state.drafts.history.rolled_back()
    manifests, damaged = await run_in_threadpool(_manifests, state.drafts.store)
    return {
        "live": state.drafts.live,
        "previous": state.drafts.previous,
        "drafts": [
            {
                **msgspec.to_builtins(m),
                "acceptance": acceptance_view(acceptance.get(m.version)),
                "rolled_back": rolled_back.get(m.version),
            }
            for m in manifests
        ],
        "damaged": damaged,
    }


def _manifests(store: WeightStore) -> tuple[list[DraftManifest], list[dict[str, Any]]]:
    """Those that can be read, and the versions whose cannot."""
    manifests, damaged = [], []
    for version in store.versions():
        try:
            manifests.append(store.manifest(version))
        except WeightError as error:
            damaged.append({"version": version, "error": str(error)})
    return manifests, damaged


class PolicyVersion(BaseModel):
    """A checkpoint to make live, or a LoRA adapter where the server was started for those."""

    model_config = ConfigDict(extra="forbid")

    folder: Path
    """Absolute, as the server sees it: ``config.json`` and ``model.safetensors``, or peft's
    ``adapter_config.json`` and ``adapter_model.safetensors``."""
    version: int = Field(ge=0)
    sha256: str = Field(pattern="^[0-9a-f]{64}$")
    """Of the weights file."""


@router.get("/policy")
async def get_policy(request: Request) -> dict[str, Any]:
    """The live version of the target, and every swap since the start, oldest first."""
    require_figures(request)
    policy = _state(request).policy
    return {
        "live": policy.live,
        "sha256": policy.sha256,
        "swaps": msgspec.to_builtins(list(policy.swaps)),
        "failed": policy.failed,
    }


@router.post("/policy")
async def post_policy(request: Request, version: PolicyVersion) -> dict[str, Any]:
    """Make a checkpoint the live target; running requests go on under it."""
    require_admin(request)
    state = _state(request)
    try:
        swap = await state.policy.publish(version.folder, version.version, version.sha256)
    except EngineGone as error:
        raise HTTPException(503, str(error)) from None
    except PolicyError as error:
        raise HTTPException(409, str(error)) from None
    return {"live": state.policy.live, **msgspec.to_builtins(swap)}


class Cores(BaseModel):
    """Cores that the model is to compute on."""

    model_config = ConfigDict(extra="forbid")

    cores: int


@router.post("/cores")
async def post_cores(request: Request, wanted: Cores) -> dict[str, Any]:
    """Have the model compute on so many of a CPU's cores, from its next step on."""
    require_admin(request)
    state = _state(request)
    try:
        threads = await state.cores.allot(wanted.cores)
    except EngineAway as error:
        raise HTTPException(503, str(error)) from None
    except CoresError as error:
        raise HTTPException(409, str(error)) from None
    return cores_view(state) | {"threads": threads}


@router.get("/history")
async def get_history(request: Request) -> dict[str, Any]:
    """What was live when, and why it changed, oldest first."""
    require_figures(request)
    return {"changes": msgspec.to_builtins(list(_state(request).drafts.history.changes))}


@router.post("/drafts/rollback")
async def post_rollback(request: Request) -> dict[str, Any]:
    """Make the previously live version live again."""
    require_admin(request)
    drafts = _state(request).drafts
    try:
        seconds = await drafts.rollback()
    except DraftError as error:
        raise HTTPException(409, str(error)) from None
    return {"live": drafts.live, "previous": drafts.previous, "seconds": seconds}


@router.post("/drafts/{version}/activate")
async def post_activate(request: Request, version: int) -> dict[str, Any]:
    """Make one version live. ``seconds`` is how long the engine stood still for it."""
    require_admin(request)
    drafts = _state(request).drafts
    if version not in await run_in_threadpool(drafts.store.versions):
        raise HTTPException(404, f"there is no draft version {version}")
    try:
        seconds = await drafts.activate(version)
    except DraftError as error:
        raise HTTPException(409, str(error)) from None
    return {"live": drafts.live, "previous": drafts.previous, "seconds": seconds}
