"""Builds the HTTP app, vLLM's routes and ours, and serves it until told to stop.

The only module outside rlcore.engine that imports vLLM. Read against vLLM 0.32.0:
``entrypoints.launchers``: ``build_app``, ``init_app_state``, ``serve_http``, ``setup_server``.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from argparse import Namespace
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
from fastapi import FastAPI
from prometheus_client import REGISTRY
from vllm.entrypoints.launchers.api_server.app_state import init_app_state
from vllm.entrypoints.launchers.app import build_app
from vllm.entrypoints.launchers.launcher import serve_http

from rlcore.engine.frontend import PacelineLLM, Ticket
from rlcore.engine.launch import start_engine
from rlcore.engine.policy_swap import swap_policy
from rlcore.errors import PacelineError
from rlcore.log import get_logger
from rlcore.records import RequestEnd
from rlcore.settings import ServeSettings
from server.cores import share_cores
from server.drafts import Drafts
from server.engine_link import EngineLink
from server.learner_link import LearnerLink
from server.learner_process import LearnerProcess
from server.metrics import PacelineCollector
from server.middleware import DraftAccount, KeyGuard
from server.policy import Policy
from server.routes import router
from server.status import ServerState

log = get_logger("server")


class ServeError(PacelineError):
    """The engine did not start, or ended by itself."""


WORKER_DEADLINE = 60.0
"""Seconds between the engine being up and its worker's first report."""

RPC_DEADLINE = 30.0


async def serve(
    settings: ServeSettings,
    args: Namespace,
    sock: socket.socket,
    drafts: Drafts,
    link_endpoint: str,
    learner_endpoint: str | None,
    learner: LearnerProcess | None,
    policy: Policy,
) -> None:
    """Bring everything up, serve, and take it down again in the opposite order."""
    engine_link = EngineLink(link_endpoint)
    background = [engine_link.run()]
    learner_link = None
    if learner_endpoint is not None:
        learner_link = LearnerLink(learner_endpoint, drafts, policy, settings.speculative_tokens)
        background.append(learner_link.run())
    if learner is not None:
        background.append(learner.run())  # it starts while the engine does
        if learner_link is not None:
            share_cores(engine_link, learner_link)
    state = ServerState(
        drafts=drafts,
        engine_link=engine_link,
        learner_link=learner_link,
        policy=policy,
        target_id=drafts.target_id,
        speculative_tokens=settings.speculative_tokens,
        guarded=settings.api_key is not None,
        started=time.time(),
    )
    engine_link.on_report.append(state.look_for_collapse)
    async with _running(background):
        try:
            llm = await asyncio.to_thread(start_engine, args)
        except Exception as error:
            reason = " ".join(str(error).split())
            raise ServeError(
                f"the engine did not start: {reason} (its own words are above)"
            ) from None
        try:
            connect(llm, drafts, policy, engine_link)
            await llm.update_weight_version(str(policy.live))
            await engine_link.wait_for_worker(WORKER_DEADLINE)
            app = await build(settings, args, llm, state)
            REGISTRY.register(PacelineCollector(state))
            log.info("ready", url=f"http://{settings.host}:{settings.port}/v1", draft=drafts.live)
            finished = await serve_http(
                app,
                sock,
                host=settings.host,
                port=settings.port,
                log_level="warning",
                access_log=False,
                timeout_keep_alive=5,
                enable_ssl_refresh=args.enable_ssl_refresh,
                ssl_keyfile=args.ssl_keyfile,
                ssl_certfile=args.ssl_certfile,
                ssl_ca_certs=args.ssl_ca_certs,
                ssl_cert_reqs=args.ssl_cert_reqs,
                h11_max_incomplete_event_size=args.h11_max_incomplete_event_size,
                h11_max_header_count=args.h11_max_header_count,
            )
            await finished
            if llm.errored:
                raise ServeError("the engine died; its own words are above")
        finally:
            llm.shutdown()
            if learner_link is not None:
                learner_link.close()
            engine_link.close()


def connect(llm: PacelineLLM, drafts: Drafts, policy: Policy, link: EngineLink) -> None:
    """Give the drafts and the policy their engine, and the engine's request ends their link."""

    async def swap(folder: str, sha256: str, version: int, rates: list[float]) -> dict[str, Any]:
        arguments = (folder, sha256, version, rates)
        reports = await llm.collective_rpc("paceline_swap", args=arguments)
        failed = [report for report in reports if report["error"] is not None]
        return (failed or reports)[0]

    def on_end(request_id: str, output_tokens: int, ticket: Ticket) -> None:
        link.send_end(RequestEnd(request_id, output_tokens, ticket.tenant, ticket.learn))

    async def swap_target(folder: str, sha256: str, version: int) -> dict[str, Any]:
        return msgspec.to_builtins(await swap_policy(llm, folder, sha256, version))

    llm.on_end = on_end
    drafts.connect(swap)
    policy.connect(swap_target)


async def build(
    settings: ServeSettings, args: Namespace, llm: PacelineLLM, state: ServerState
) -> FastAPI:
    """vLLM's app with our routes and our wrapping."""
    tasks = await llm.get_supported_tasks()
    app = build_app(args, tasks, llm.model_config)
    app.state.paceline = state
    app.include_router(router)
    await init_app_state(llm, app.state, args, tasks)

    async def acceptance_of(engine_ids: list[str]) -> list[dict[str, Any]]:
        answers = await llm.collective_rpc(
            "paceline_request_acceptance", timeout=RPC_DEADLINE, args=(engine_ids,)
        )
        return list(answers[0])

    # vLLM has built the middleware stack already, so ours goes around it.
    stack = app.middleware_stack or app.build_middleware_stack()
    stack = DraftAccount(stack, state.drafts, state.policy, acceptance_of)
    if settings.api_key is not None:
        stack = KeyGuard(stack, settings.api_key.get_secret_value())
    app.middleware_stack = stack
    return app


@contextlib.asynccontextmanager
async def _running(work: list[Any]) -> AsyncIterator[None]:
    tasks = [asyncio.ensure_future(item) for item in work]
    for task in tasks:
        task.add_done_callback(_say_if_failed)
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _say_if_failed(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and task.exception() is not None:
        log.error("a background task of the server failed", error=repr(task.exception()))


def draft_folder(drafts: Drafts) -> Path:
    return drafts.store.folder(drafts.live)
