"""Brings a server up, keeps it serving until it is told to stop, and takes it down."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from argparse import Namespace

from prometheus_client import REGISTRY

from rlcore.curve import curve_client
from rlcore.engine.frontend import PacelineLLM
from rlcore.engine.launch import renewed, start_engine
from rlcore.engine.options import EngineOptions
from rlcore.home import Home
from rlcore.live_drafts import expected_rates
from rlcore.log import get_logger
from rlcore.settings import ServeSettings
from server.access import Gate
from server.app import Inner, allotter, connect, fresh_certificates, swapper
from server.background import running
from server.cores import share_cores
from server.drafts import Drafts
from server.engine_link import EngineLink
from server.feed import Feed
from server.front import READY, Front
from server.keeper import EngineKeeper, ServeError
from server.keyring import KeyRing
from server.learner_link import LearnerLink
from server.learner_process import LearnerProcess
from server.listener import listening, make_listener
from server.metrics import PacelineCollector
from server.metrics_gain import GainCollector
from server.model_cores import ModelCores
from server.overload import Places
from server.policy import TARGET_VERSION, Policy
from server.purges import OPEN_PURGES, EndClock, Purges, has_traces
from server.shutdown import Stop, at_once, drain
from server.status import ServerState
from server.totals import ServedTotals

log = get_logger("server")

WORKER_DEADLINE = 60.0
"""Seconds between the engine being up and its worker's first report."""


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
    engine_link = EngineLink(link_endpoint)
    background = [engine_link.run()]
    options = EngineOptions.from_config(args.additional_config)
    cores = ModelCores(options.cores, options.allotted)
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
        if learner_link is not None and settings.cores is None:
            share_cores(engine_link, learner_link, cores)
    served = ServedTotals()
    state = ServerState(
        drafts=drafts,
        engine_link=engine_link,
        learner_link=learner_link,
        policy=policy,
        cores=cores,
        target_id=drafts.target_id,
        speculative_tokens=settings.speculative_tokens,
        gate=gate,
        started=time.monotonic(),
        ready=lambda: front.ready,
        engine_restarts=lambda: keeper.restarts,
        refused=front.refused,
        served=served,
    )
    engine_link.on_report.append(state.look_for_collapse)
    feed = Feed(state)
    background.append(feed.run())

    home = Home(settings.home)
    purges = Purges(
        home.learner / OPEN_PURGES,
        learner_link,
        lambda: has_traces(home),
        engine_link.forget,
        EndClock(),
    )
    background.append(purges.run())
    inner = Inner(args, state, feed, purges, front)

    async def arguments() -> Namespace:
        await drafts.fall_back()
        rates = expected_rates(drafts.manifest())
        return renewed(args, drafts.store.folder(drafts.live), drafts.live, rates)

    async def install(llm: PacelineLLM) -> None:
        await llm.update_weight_version(str(TARGET_VERSION))
        await policy.restore(swapper(llm))
        await cores.connect(allotter(llm))
        try:
            await engine_link.wait_for_worker(WORKER_DEADLINE)
        except TimeoutError:
            raise ServeError(
                f"the engine is up, but its worker has not reported within {WORKER_DEADLINE:.0f} s"
            ) from None
        connect(llm, drafts, policy, engine_link, purges)
        served.connect(llm.served)
        await inner.install(llm)
        running = llm.vllm_config.scheduler_config.max_num_seqs
        waiting = settings.max_waiting
        front.places.running = running
        front.places.waiting = running if waiting is None else waiting

    def remove() -> None:
        drafts.disconnect()
        policy.disconnect()
        cores.disconnect()
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
        hurry = asyncio.ensure_future(at_once(stop, listener, learner))
        stack.callback(hurry.cancel)
        stack.callback(engine_link.close)
        if learner_link is not None:
            stack.callback(learner_link.close)
        await stack.enter_async_context(running(background))
        await stack.enter_async_context(inner)
        stack.push_async_callback(keeper.stop)
        await stack.enter_async_context(listening(listener, sock))
        stack.enter_context(fresh_certificates(listener.config.ssl, args))
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


def gate_of(settings: ServeSettings) -> Gate:
    """The keys in force. Raises KeysError."""
    api, admin = settings.api_key, settings.admin_key
    return Gate(
        None if api is None else api.get_secret_value(),
        None if admin is None else admin.get_secret_value(),
        None if settings.keys_file is None else KeyRing(settings.keys_file),
    )
