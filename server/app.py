"""Builds the HTTP app, vLLM's routes and ours, and serves it until told to stop.

The only module outside rlcore.engine that imports vLLM. Read against vLLM 0.32.0:
``entrypoints.launchers``: ``build_app``, ``init_app_state``, and ``serve_http``, in place of which
``server.listener``, ``server.keeper`` and ``server.shutdown`` stand: vLLM's ends the process when its engine
dies, and stops the engine at once on a signal unless told a timeout.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from argparse import Namespace
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec
from fastapi import FastAPI
from prometheus_client import REGISTRY
from vllm import envs
from vllm.entrypoints.launchers.api_server.app_state import init_app_state
from vllm.entrypoints.launchers.app import build_app
from vllm.entrypoints.launchers.utils.ssl import SSLCertRefresher
from vllm.tasks import SupportedTask
from vllm.v1.engine.exceptions import EngineDeadError

from rlcore.curve import curve_client
from rlcore.engine.frontend import PacelineLLM, Ticket
from rlcore.engine.launch import renewed, start_engine
from rlcore.engine.policy_swap import swap_policy
from rlcore.home import Home
from rlcore.live_drafts import expected_rates
from rlcore.log import get_logger
from rlcore.records import RequestEnd
from rlcore.settings import ServeSettings
from server.access import Access, Gate
from server.cores import share_cores
from server.drafts import Drafts
from server.engine_link import EngineLink
from server.feed import Feed
from server.front import READY, Front
from server.keeper import EngineKeeper, kill_engine_processes
from server.keyring import KeyRing
from server.learner_link import LearnerLink
from server.learner_process import LearnerProcess
from server.listener import Listener, listening, make_listener
from server.metrics import PacelineCollector
from server.metrics_gain import GainCollector
from server.middleware import DraftAccount
from server.overload import Places
from server.policy import TARGET_VERSION, Policy
from server.purges import OPEN_PURGES, EndClock, Purges, has_traces
from server.routes import router
from server.routes_feed import router as feed_router
from server.routes_tenants import router as tenants_router
from server.shutdown import Stop
from server.status import ServerState
from server.totals import ServedTotals

log = get_logger("server")


WORKER_DEADLINE = 60.0
"""Seconds between the engine being up and its worker's first report."""

RPC_DEADLINE = 30.0

DRAIN_LOOK = 0.1
"""Seconds between two looks at what still runs."""

LAST_WORDS = 2.0
"""Seconds for requests that are ended to say so."""


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
    """Listen, bring everything up, serve until told to stop, and take it down in the opposite order."""
    front = Front(
        Places(running=0, waiting=0),  # known with the engine
        most_body=int(settings.max_body_mib * 2**20),
        most_fields=args.h11_max_header_count,
    )
    stop = Stop()
    gate = gate_of(settings)
    ended = EndClock()
    engine_link = EngineLink(link_endpoint)
    background = [engine_link.run()]
    learner_link = None
    if learner_endpoint is not None:
        learner_link = LearnerLink(
            learner_endpoint,
            drafts,
            policy,
            settings.speculative_tokens,
            curve_client(settings.curve_secret_file, settings.curve_server_key_file),
            dict if gate.ring is None else gate.ring.replay_shares,
        )
        background.append(learner_link.run())
    if learner is not None:
        background.append(learner.run())  # it starts while the engine does
        if learner_link is not None:
            share_cores(engine_link, learner_link)
    served = ServedTotals()
    state = ServerState(
        drafts=drafts,
        engine_link=engine_link,
        learner_link=learner_link,
        policy=policy,
        target_id=drafts.target_id,
        speculative_tokens=settings.speculative_tokens,
        gate=gate,
        started=time.time(),
        ready=lambda: front.ready,
        engine_restarts=lambda: keeper.restarts,
        refused=front.refused,
        served=served,
    )
    engine_link.on_report.append(state.look_for_collapse)
    feed = Feed(state)
    background.append(feed.run())

    def forget(tenant: str) -> None:
        if keeper.llm is not None:
            keeper.llm.forget(tenant)
        engine_link.forget(tenant)

    home = Home(settings.home)
    purges = Purges(
        home.learner / OPEN_PURGES, learner_link, lambda: has_traces(home), forget, ended
    )
    background.append(purges.run())
    inner = Inner(settings, args, state, feed, purges, front)

    def arguments() -> Namespace:
        drafts.fall_back()
        rates = expected_rates(drafts.manifest())
        return renewed(args, draft_folder(drafts), drafts.live, rates)

    async def install(llm: PacelineLLM) -> None:
        await llm.update_weight_version(str(TARGET_VERSION))
        await policy.restore(swapper(llm))
        await engine_link.wait_for_worker(WORKER_DEADLINE)
        connect(llm, drafts, policy, engine_link, ended)
        served.connect(llm.served)
        await inner.install(llm)
        running = llm.vllm_config.scheduler_config.max_num_seqs
        waiting = settings.max_waiting
        front.places.running = running
        front.places.waiting = running if waiting is None else waiting

    def remove() -> None:
        drafts.disconnect()
        policy.disconnect()
        served.disconnect()
        engine_link.forget_workers()

    keeper = EngineKeeper(front, arguments, start_engine, install, remove)
    listener = make_listener(front, args)
    scheme = "https" if args.ssl_certfile else "http"
    log.info("listening", url=f"{scheme}://{settings.host}:{settings.port}/v1", ready=READY)
    REGISTRY.register(PacelineCollector(state))
    REGISTRY.register(GainCollector(state, feed))
    async with contextlib.AsyncExitStack() as stack:
        stack.enter_context(stop.on_signals())
        hurry = asyncio.ensure_future(_hurry(stop, listener, learner))
        stack.callback(hurry.cancel)
        stack.callback(engine_link.close)
        if learner_link is not None:
            stack.callback(learner_link.close)
        await stack.enter_async_context(_running(background))
        await stack.enter_async_context(inner)
        stack.push_async_callback(keeper.stop)
        await stack.enter_async_context(listening(listener, sock))
        if args.enable_ssl_refresh and listener.config.ssl is not None:
            refresher = SSLCertRefresher(
                listener.config.ssl, args.ssl_keyfile, args.ssl_certfile, args.ssl_ca_certs
            )
            stack.callback(refresher.stop)
        serving = asyncio.ensure_future(keeper.run())
        try:
            await asyncio.wait(
                {serving, asyncio.ensure_future(stop.asked.wait())},
                return_when=asyncio.FIRST_COMPLETED,
            )
            if serving.done():
                front.change("failed")
                serving.result()
            await drain(front, keeper, stop, settings.drain_s)
        finally:
            serving.cancel()
            await asyncio.gather(serving, return_exceptions=True)
    log.info("ended")


async def drain(front: Front, keeper: EngineKeeper, stop: Stop, seconds: float) -> None:
    """Take no new requests, and let the running ones end, for so long; then end them."""
    front.change("draining")
    log.info("draining", requests=front.running, seconds=seconds)
    await _until_idle(front, stop, seconds)
    if front.running:
        log.warning("requests are ended unfinished", requests=front.running)
        if keeper.llm is not None:
            keeper.llm.end_requests("The server is shutting down; send the request anew.")
        # They answer for themselves, streams with an event.
        await _until_idle(front, stop, LAST_WORDS)
    front.end_requests()


async def _until_idle(front: Front, stop: Stop, seconds: float) -> None:
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            while front.running and not stop.hurried.is_set():
                await asyncio.sleep(DRAIN_LOOK)


async def _hurry(stop: Stop, listener: Listener, learner: LearnerProcess | None) -> None:
    """A second signal kills whatever is waited for."""
    await stop.hurried.wait()
    listener.force_exit = True
    kill_engine_processes()
    if learner is not None:
        learner.kill()


class Inner:
    """The app behind the front: made for the first engine, and given each further one."""

    def __init__(
        self,
        settings: ServeSettings,
        args: Namespace,
        state: ServerState,
        feed: Feed,
        purges: Purges,
        front: Front,
    ) -> None:
        self._settings = settings
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
                await self._stack.enter_async_context(_running([self._log_stats()]))
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
        app.middleware_stack = Access(stack, self._state.gate, self._state.quotas)
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
    llm: PacelineLLM, drafts: Drafts, policy: Policy, link: EngineLink, ended: EndClock
) -> None:
    """Give the drafts and the policy their engine, and the engine's request ends their link."""

    async def swap(folder: str, sha256: str, version: int, rates: list[float]) -> dict[str, Any]:
        arguments = (folder, sha256, version, rates)
        reports = await llm.collective_rpc("paceline_swap", args=arguments)
        failed = [report for report in reports if report["error"] is not None]
        return (failed or reports)[0]

    def on_end(request_id: str, output_tokens: int, ticket: Ticket) -> None:
        now = ended.now()
        link.send_end(RequestEnd(request_id, output_tokens, ticket.tenant, ticket.learn, now))

    llm.on_end = on_end
    drafts.connect(swap)
    policy.connect(swapper(llm))


def gate_of(settings: ServeSettings) -> Gate:
    """The keys in force. Raises KeysError."""
    api, admin = settings.api_key, settings.admin_key
    return Gate(
        None if api is None else api.get_secret_value(),
        None if admin is None else admin.get_secret_value(),
        None if settings.keys_file is None else KeyRing(settings.keys_file),
    )


def swapper(llm: PacelineLLM) -> Callable[[str, str, int], Awaitable[dict[str, Any]]]:
    """What makes a checkpoint the engine's policy."""

    async def swap_target(folder: str, sha256: str, version: int) -> dict[str, Any]:
        return msgspec.to_builtins(await swap_policy(llm, folder, sha256, version))

    return swap_target


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
