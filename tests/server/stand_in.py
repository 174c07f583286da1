"""The server's own routes on a real socket, without an engine: reports come through ZeroMQ, as they do.

``python -m tests.server.stand_in [PORT [KEY]]`` serves made traffic for a look at the dashboard.
"""

from __future__ import annotations

import asyncio
import socket
import sys
import tempfile
import threading
import time
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import msgspec
import torch
import uvicorn
import zmq
import zmq.asyncio
from fastapi import FastAPI

from rlcore.live_drafts import LiveDraft
from rlcore.records.learner_link import LearnerReport
from rlcore.records.versions import DraftManifest
from rlcore.records.wire import encode
from rlcore.transport import learner_endpoints, open_socket
from rlcore.weights import WeightStore
from server.access import Access, Gate
from server.drafts import Drafts, write_live
from server.engine_link import EngineLink
from server.feed import Feed
from server.history import FILE, Change
from server.learner_link import LearnerLink
from server.model_cores import ModelCores
from server.policy import Policy
from server.quotas import Quotas
from server.routes import router
from server.routes_feed import router as feed_router
from server.status import ServerState
from tests.server.traffic import MOST_DRAFTS, Traffic

TARGET = "SmolLM2-135M-Instruct-0123456789ab"
METHOD = "eagle3"
REPORT_S = 0.2
"""Faster than a real engine, so that tests need not wait."""


def make_store(root: Path, versions: int = 6) -> WeightStore:
    """Versions 0 .. versions - 1, the last but two live; its history tells of a rollback."""
    store = WeightStore(root / "drafts")
    now, live = time.time(), max(0, versions - 3)
    for version in range(versions):
        length = 1.6 + 0.25 * version
        manifest = DraftManifest(
            version=version, parent=version - 1 if version else None, method=METHOD, sha256="",
            target_id=TARGET, target_version=0, origin="learned" if version else "shipped",
            created=now - 160 * (versions - version), tokens_seen=40_000 * version,
            heldout_length=length, parent_length=length - 0.24 if version else None,
            gain_lower=0.11 if version else None, heldout_rates=(0.6, 0.55, 0.5),
        )  # fmt: skip
        store.publish({"fc.weight": torch.full((3, 2), float(version))}, {}, manifest)
    write_live(store.root, LiveDraft(live, live - 1 if live else None))
    changes = [
        Change(now - 620, 2, 1, "promoted"),
        Change(now - 380, 4, 2, "promoted"),
        Change(now - 300, 2, 4, "rolled_back", "acceptance length 1.71, was 2.08 before"),
        Change(now - 120, 3, 2, "promoted"),
    ]
    lines = [msgspec.json.encode(change) for change in changes if change.version < versions]
    (store.root / FILE).write_bytes(b"".join(line + b"\n" for line in lines))
    return store


class StandIn:
    """``with StandIn(folder) as server: ...``; everything runs on a thread's own event loop."""

    def __init__(
        self,
        folder: Path,
        *,
        key: str | None = None,
        traffic: Traffic | None = None,
        learner: bool = True,
        versions: int = 6,
        past_s: int = 0,
        port: int = 0,
    ) -> None:
        """``past_s``: seconds of history that are there from the start."""
        self.traffic = traffic or Traffic()
        self.swap_error: str | None = None
        self._folder = folder
        folder.mkdir(exist_ok=True)
        self._key = key
        self._learner = learner
        self._versions = versions
        self._past_s = past_s
        self._sock = socket.create_server(("127.0.0.1", port))
        self.url = f"http://127.0.0.1:{self._sock.getsockname()[1]}"
        self._thread = threading.Thread(target=lambda: asyncio.run(self._main()), daemon=True)
        self._up = threading.Event()
        self.loop: asyncio.AbstractEventLoop
        self.feed: Feed
        self.drafts: Drafts
        self._server: uvicorn.Server
        self.failure: BaseException | None = None

    def __enter__(self) -> Self:
        self._thread.start()
        assert self._up.wait(30), "the stand-in did not come up within 30 s"
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()

    def stop(self) -> None:
        self._server.should_exit = True
        self._thread.join(20)
        assert not self._thread.is_alive(), "the stand-in did not end within 20 s"

    def call(self, work: Any) -> Any:
        """Run a coroutine on the server's loop."""
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(20)

    async def _swap(self, folder: str, sha: str, version: int, rates: list[float]) -> dict:
        await asyncio.sleep(0.05)
        if self.swap_error is not None:
            return {"error": self.swap_error, "reason": "injected", "seconds": 0.0}
        self.traffic.version = version
        return {"error": None, "reason": None, "seconds": 0.031}

    async def _main(self) -> None:
        self.loop = asyncio.get_running_loop()
        store = make_store(self._folder, self._versions)
        drafts = Drafts.load(store, TARGET, METHOD)
        assert drafts is not None
        self.drafts = drafts
        drafts.connect(self._swap)
        self.traffic.version = drafts.live
        policy = Policy(self._folder, 0)
        engine = f"ipc://{self._folder}/engine"
        link = EngineLink(engine)
        base = f"ipc://{self._folder}/learner"
        _, control = learner_endpoints(base)
        learner = LearnerLink(control, drafts, policy, MOST_DRAFTS) if self._learner else None
        gate = Gate(api_key=self._key)
        state = ServerState(
            drafts=drafts, engine_link=link, learner_link=learner, policy=policy,
            cores=ModelCores(0, 0), target_id=TARGET,
            speculative_tokens=MOST_DRAFTS, started=time.monotonic(), served=self.traffic.served,
        )  # fmt: skip
        feed = self.feed = Feed(state)
        self._relive(link, learner)
        app = FastAPI()
        app.state.paceline, app.state.paceline_feed = state, feed
        app.include_router(router)
        app.include_router(feed_router)
        config = uvicorn.Config(Access(app, gate, Quotas()), log_level="warning", lifespan="off")
        self._server = uvicorn.Server(config)
        self._server.install_signal_handlers = lambda: None  # type: ignore[attr-defined]
        work = [link.run(), feed.run(), self._engine(engine)]
        if learner is not None:
            work += [learner.run(), self._learn(control)]
        tasks = [asyncio.ensure_future(item) for item in work]
        serving = asyncio.ensure_future(self._server.serve([self._sock]))
        while not self._server.started:
            await asyncio.sleep(0.01)
        self._up.set()
        while not self._server.should_exit:
            await asyncio.sleep(0.02)
        tasks[1].cancel()  # the feed ends, or the server would wait for its clients
        await serving
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if learner is not None:
            learner.close()
        link.close()

    def _relive(self, link: EngineLink, learner: LearnerLink | None) -> None:
        """The seconds before the start, in which the drafter learned, and the load came and went."""
        traffic, now, wall = self.traffic, time.monotonic(), time.time()
        live, drafts, rate, streams = traffic.version, traffic.drafts, traffic.rate, traffic.streams
        for ago in range(self._past_s, 0, -1):
            part = 1 - ago / self._past_s
            traffic.streams = 0 if 0.13 < part < 0.16 else 1 + int(4 * part) % 3
            traffic.drafts = 0 if part < 0.06 else 1 if part < 0.12 else drafts
            traffic.rate = 0.25 + (rate - 0.25) * min(1.0, part * 1.2)
            if 300 < ago < 380:
                traffic.rate, traffic.version = traffic.rate * 0.55, 4
            else:
                traffic.version = live if ago < 120 else 2
            traffic.advance(1.0)
            self._take_in(link, learner, now - ago)
            self.feed.tick(now - ago, wall - ago)
        traffic.version, traffic.drafts, traffic.rate, traffic.streams = live, drafts, rate, streams

    def _take_in(self, link: EngineLink, learner: LearnerLink | None, at: float) -> None:
        copied = msgspec.convert(msgspec.to_builtins(self.traffic.engine_report()), type(
            self.traffic.engine_report()
        ))  # fmt: skip
        link.report, link.reported_at = copied, at
        link.speculation = msgspec.structs.replace(self.traffic.speculation)
        link.speculation_at = at
        if learner is not None:
            learner.report = msgspec.structs.replace(self.traffic.learner)
            learner.reported_at = at

    async def _engine(self, endpoint: str) -> None:
        """Two peers, as the worker and the scheduler are."""
        context = zmq.asyncio.Context.instance()
        worker = open_socket(context, zmq.DEALER, endpoint, bind=False)
        scheduler = open_socket(context, zmq.DEALER, endpoint, bind=False)
        try:
            while True:
                self.traffic.advance(REPORT_S)
                await worker.send(encode(self.traffic.engine_report()))
                await scheduler.send(encode(self.traffic.speculation))
                await asyncio.sleep(REPORT_S)
        finally:
            worker.close()
            scheduler.close()

    async def _learn(self, endpoint: str) -> None:
        control = open_socket(zmq.asyncio.Context.instance(), zmq.ROUTER, endpoint, bind=True)
        server: bytes | None = None
        try:
            while True:
                with suppress(TimeoutError):
                    async with asyncio.timeout(REPORT_S):
                        server = (await control.recv_multipart())[0]
                if server is not None:
                    report: LearnerReport = self.traffic.learner
                    await control.send_multipart([server, encode(report)])
                    await asyncio.sleep(REPORT_S)
        finally:
            control.close()


def main() -> None:
    port, key = (int(sys.argv[1]) if len(sys.argv) > 1 else 0), (sys.argv[2:] or [None])[0]
    with tempfile.TemporaryDirectory() as folder:
        server = StandIn(Path(folder), key=key, past_s=900, port=port)
        with server:
            print(f"{server.url}/dashboard", flush=True)
            with suppress(KeyboardInterrupt):
                threading.Event().wait()


if __name__ == "__main__":
    main()
