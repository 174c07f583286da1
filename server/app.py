"""Builds the HTTP app, vLLM's routes and ours, and gives it its engines.

The only module outside rlcore.engine that imports vLLM. Read against vLLM 0.32.0:
``entrypoints.launchers``: ``build_app``, ``init_app_state``, and ``serve_http``, in place of which
``server.listener``, ``server.keeper`` and ``server.shutdown`` stand: vLLM's ends the process when its engine
dies, and stops the engine at once on a signal unless told a timeout.
"""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from argparse import Namespace
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import msgspec
from fastapi import FastAPI
from vllm import envs
from vllm.entrypoints.launchers.api_server.app_state import init_app_state
from vllm.entrypoints.launchers.app import build_app
from vllm.entrypoints.launchers.utils.ssl import SSLCertRefresher
from vllm.tasks import SupportedTask
from vllm.v1.engine.exceptions import EngineDeadError

from rlcore.engine.frontend import PacelineLLM, Ticket
from rlcore.engine.policy_swap import swap_policy
from rlcore.records.engine_link import RequestEnd
from server.access import Access
from server.background import running
from server.drafts import Drafts
from server.engine_link import EngineLink
from server.feed import Feed
from server.front import Front
from server.middleware import DraftAccount
from server.policy import Policy
from server.purges import Purges
from server.routes import router
from server.routes_feed import router as feed_router
from server.routes_tenants import router as tenants_router
from server.status import ServerState

RPC_DEADLINE = 30.0


class Inner:
    """The app behind the front: made for the first engine, and given each further one."""

    def __init__(
        self,
        args: Namespace,
        state: ServerState,
        feed: Feed,
        purges: Purges,
        front: Front,
    ) -> None:
        self._args = args
        self._state = state
        self._feed = feed
        self._purges = purges
        self._front = front
        self._app: FastAPI | None = None
        self._llm: PacelineLLM
        self._stack = contextlib.AsyncExitStack()

    async def install(self, llm: PacelineLLM) -> None:
        self._llm = llm
        tasks = await llm.get_supported_tasks()
        if self._app is None:
            self._app = self._build(llm, tasks)
            await init_app_state(llm, self._app.state, self._args, tasks)
            # vLLM's lifespan would log the figures of the first engine for ever.
            logs, self._app.state.log_stats = self._app.state.log_stats, False
            await self._stack.enter_async_context(self._app.router.lifespan_context(self._app))
            self._app.state.log_stats = logs
            if logs:
                await self._stack.enter_async_context(running([self._log_stats()]))
        else:
            await init_app_state(llm, self._app.state, self._args, tasks)
        self._front.inner = self._app

    def _build(self, llm: PacelineLLM, tasks: tuple[SupportedTask, ...]) -> FastAPI:
        """vLLM's app with our routes and our wrapping."""
        app = build_app(self._args, tasks, llm.model_config)
        app.state.paceline = self._state
        app.state.paceline_feed = self._feed
        app.state.server = None  # vLLM ends this one when its engine dies, unless told to keep it
        app.include_router(router)
        app.include_router(feed_router)
        app.state.paceline_purges = self._purges
        app.include_router(tenants_router)

        async def acceptance_of(engine_ids: list[str]) -> list[dict[str, Any]]:
            try:
                answers = await self._llm.collective_rpc(
                    "paceline_request_acceptance", timeout=RPC_DEADLINE, args=(engine_ids,)
                )
            except EngineDeadError:
                return []  # it died after the answer: that one stands, without its account
            return list(answers[0])

        # vLLM has built the middleware stack already, so ours goes around it.
        stack = app.middleware_stack or app.build_middleware_stack()
        stack = DraftAccount(stack, self._state.drafts, self._state.policy, acceptance_of)
        app.middleware_stack = Access(
            stack, self._state.gate, self._state.quotas, self._front.refused
        )
        return app

    async def _log_stats(self) -> None:
        while True:
            await asyncio.sleep(envs.VLLM_LOG_STATS_INTERVAL)
            await self._llm.do_log_stats()

    async def __aenter__(self) -> Inner:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()


def connect(
    llm: PacelineLLM, drafts: Drafts, policy: Policy, link: EngineLink, purges: Purges
) -> None:
    """Give the drafts and the policy their engine, and the engine's request ends their link."""

    async def swap(folder: str, sha256: str, version: int, rates: list[float]) -> dict[str, Any]:
        arguments = (folder, sha256, version, rates)
        reports = await llm.collective_rpc("paceline_swap", args=arguments)
        failed = [report for report in reports if report["error"] is not None]
        return (failed or reports)[0]

    def on_end(request_id: str, output_tokens: int, ticket: Ticket) -> None:
        learn = ticket.learn and not purges.covers(ticket.tenant, ticket.came)
        now = purges.clock.now()
        link.send_end(RequestEnd(request_id, output_tokens, ticket.tenant, learn, now))

    llm.on_end = on_end
    drafts.connect(swap)
    policy.connect(swapper(llm))


def swapper(llm: PacelineLLM) -> Callable[[str, str, int], Awaitable[dict[str, Any]]]:
    """What makes a checkpoint the engine's policy."""

    async def swap_target(folder: str, sha256: str, version: int) -> dict[str, Any]:
        return msgspec.to_builtins(await swap_policy(llm, folder, sha256, version))

    return swap_target


def allotter(llm: PacelineLLM) -> Callable[[int], Awaitable[int]]:
    """What has the engine's model compute on so many cores."""

    async def compute_on(cores: int) -> int:
        answers = await llm.collective_rpc(
            "paceline_compute_on", timeout=RPC_DEADLINE, args=(cores,)
        )
        return int(answers[0])

    return compute_on


@contextlib.contextmanager
def fresh_certificates(context: ssl.SSLContext | None, args: Namespace) -> Iterator[None]:
    """Inside, TLS files that change are read again, where the user asks for it."""
    if context is None or not args.enable_ssl_refresh:
        yield
        return
    refresher = SSLCertRefresher(context, args.ssl_keyfile, args.ssl_certfile, args.ssl_ca_certs)
    try:
        yield
    finally:
        refresher.stop()
