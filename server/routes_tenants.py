"""What a tenant has had, what it may have, and the end of its traces."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from fastapi import APIRouter, HTTPException, Path, Request
from starlette.responses import JSONResponse, Response

from server.access import identity_of, require_figures
from server.keys import TENANT_PATTERN
from server.purges import PurgeDelayed, Purges
from server.status import ServerState
from server.tenants import tenant_names, tenant_view

router = APIRouter(prefix="/v1/paceline/tenants", tags=["paceline"])

Tenant = Annotated[str, Path(pattern=f"^{TENANT_PATTERN}$")]

RETRY_AFTER_S = 10


def _state(request: Request) -> ServerState:
    state: ServerState = request.app.state.paceline
    return state


def _purges(request: Request) -> Purges:
    purges: Purges = request.app.state.paceline_purges
    return purges


@router.get("")
async def get_tenants(request: Request) -> dict[str, Any]:
    """Every tenant that has rules or was served: figures, rules, open purges."""
    require_figures(request)
    state, purges = _state(request), _purges(request)
    return {"tenants": {name: tenant_view(state, purges, name) for name in tenant_names(state)}}


@router.get("/{tenant}")
async def get_tenant(request: Request, tenant: Tenant) -> dict[str, Any]:
    """The same of one tenant; each tenant may see its own."""
    identity = identity_of(request)
    if identity.tenant != tenant and not identity.sees_all:
        raise HTTPException(403, "a tenant sees only its own figures")
    return tenant_view(_state(request), _purges(request), tenant)


@router.delete("/{tenant}/traces", response_model=None)
async def delete_traces(request: Request, tenant: Tenant) -> dict[str, Any] | Response:
    """Delete all that is kept of a tenant's traffic. The answer comes when it is gone, and counts it.

    Replay in memory and on disk, held-out slices, recordings, and what the engine has not handed over.
    503 when the learner cannot be reached: the order stands, and is carried out when it can be.
    """
    if not identity_of(request).may_purge(tenant):
        raise HTTPException(403, "a tenant's traces are purged with its own key, or an admin's")
    try:
        deleted = await _purges(request).purge(tenant)
    except PurgeDelayed as error:
        body = {
            "error": {"message": str(error), "type": "service_unavailable", "code": "purge_delayed"}
        }
        return JSONResponse(body, 503, {"Retry-After": f"{RETRY_AFTER_S}"})
    return {"tenant": tenant, "deleted": msgspec.to_builtins(deleted)}
