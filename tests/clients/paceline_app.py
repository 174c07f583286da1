"""The server's real routes on recorded data, with a model that answers as it is told to."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
from fastapi import FastAPI, Request
from starlette.responses import JSONResponse, StreamingResponse

from rlcore.engine.frontend import current_ticket
from rlcore.feed import History
from rlcore.records.acceptance import AcceptanceCount
from rlcore.records.engine_link import CaptureCounts, EngineReport
from rlcore.records.learner_link import PurgeCounts
from server.access import Access, Gate
from server.feed import Subscriber, TooManySubscribers, event
from server.middleware import DraftAccount
from server.model_cores import ModelCores
from server.policy import Policy
from server.quotas import Quotas
from server.routes import router
from server.routes_feed import router as feed_router
from server.routes_tenants import router as tenants_router
from server.status import ServerState
from tests.clients.recorded import history, sample
from tests.clients.stub import chunk
from tests.server.test_drafts import made

KEY = "a-key"
MODEL = "stub"


class RecordedFeed:
    """Stands for ``server.feed.Feed``: a sample every ``period`` seconds.

    While it ``refuses``, feeds end and no new one is opened.
    """

    def __init__(self, period: float = 0.1, past: int = 120) -> None:
        self.period = period
        self.past = past
        self.refuses = False

    def history(self, seconds: float) -> History:
        start = time.time() - self.past
        whole = history(self.past, start)
        kept = tuple(s for s in whole.samples if s.time >= time.time() - seconds)
        return msgspec.structs.replace(whole, samples=kept)

    @contextmanager
    def subscribed(self) -> Iterator[Subscriber]:
        if self.refuses:
            raise TooManySubscribers("not now")
        subscriber = Subscriber()
        task = asyncio.ensure_future(self._tell(subscriber))
        try:
            yield subscriber
        finally:
            task.cancel()

    async def _tell(self, subscriber: Subscriber) -> None:
        start = time.time() - self.past
        for second in range(self.past, self.past + 10_000):
            now = msgspec.structs.replace(sample(second, start), time=time.time())
            if self.refuses:
                subscriber.end()
                return
            subscriber.offer(event("sample", now))
            await asyncio.sleep(self.period)


class PacelineApp:
    """``answer``: the steps of every answer, each the texts of its tokens. The live draft is version 0.

    ``merged`` steps go into one chunk; a chunk comes every ``pause`` seconds.
    """

    def __init__(self, root: Path) -> None:
        self.drafts, self.engine = made(root)
        self.answer: list[list[str]] = [["Hello"], [",", " world", "!"], [" And", " you", "?"]]
        self.merged = 1
        self.pause = 0.0
        self.bodies: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.purged: list[str] = []
        self.left = threading.Event()
        """Set when a client goes before its answer has ended."""
        self.feed = RecordedFeed()
        self.policy = Policy(root, 0)
        self.policy.connect(self.swap_policy)
        self.cores = ModelCores(4, 4)
        asyncio.run(self.cores.connect(self.compute_on))
        acceptance = [AcceptanceCount(0, 10, 2, 25, [10, 8], [9, 6])]
        report = EngineReport("w", 0, 2, acceptance, CaptureCounts(captured=5, sent=4))
        inner = FastAPI()
        inner.state.paceline = ServerState(
            drafts=self.drafts, engine_link=SimpleNamespace(report=report), learner_link=None,
            policy=self.policy, cores=self.cores, target_id="t", speculative_tokens=2, started=0.0,
        )  # fmt: skip
        inner.state.paceline_feed = self.feed
        inner.include_router(router)
        inner.state.paceline_purges = SimpleNamespace(purge=self.purge)
        inner.include_router(feed_router)
        inner.include_router(tenants_router)
        inner.get("/v1/models")(self.models)
        inner.post("/v1/chat/completions", response_model=None)(self.chat)
        account = DraftAccount(inner, self.drafts, self.policy, self.acceptance_of)
        self.app: Any = Access(account, Gate(api_key=KEY), Quotas())
        self.url = ""

    async def swap_policy(self, folder: str, sha256: str, version: int) -> dict[str, Any]:
        return {
            "stall_seconds": 0.5, "apply_seconds": 0.25, "stage_seconds": 1.0,
            "frozen_requests": 2, "frozen_tokens": 40,
        }  # fmt: skip

    async def compute_on(self, cores: int) -> int:
        return cores

    async def acceptance_of(self, ids: list[str]) -> list[dict[str, Any]]:
        count = AcceptanceCount(0)
        for step in self.answer[1:]:
            count.observe(2, len(step) - 1)
        return [msgspec.to_builtins(count) | {"length": count.length}]

    async def purge(self, tenant: str) -> PurgeCounts:
        self.purged.append(tenant)
        return PurgeCounts(replay_spans=3, recorded_traces=1)

    async def models(self) -> dict[str, Any]:
        one = {"id": MODEL, "object": "model", "created": 0, "owned_by": "x"}
        return {"object": "list", "data": [one]}

    async def chat(self, request: Request) -> StreamingResponse | JSONResponse:
        body = await request.json()
        self.bodies.append(body)
        self.headers.append(dict(request.headers))
        if body["messages"][-1]["content"] == "refuse":
            error = {"message": "the prompt is\ntoo long", "type": "BadRequestError", "code": 400}
            return JSONResponse({"error": error}, 400)
        ticket = current_ticket.get()
        assert ticket is not None
        ticket.engine_ids.append("e")
        if not body.get("stream"):
            return JSONResponse(
                {"id": "a", "object": "chat.completion", "created": 0, "model": MODEL,
                 "choices": [{"index": 0, "finish_reason": "stop", "message":
                              {"role": "assistant", "content": self.text}}],
                 "usage": self.usage}
            )  # fmt: skip
        return StreamingResponse(self.events(ticket), media_type="text/event-stream")

    @property
    def text(self) -> str:
        return "".join(token for step in self.answer for token in step)

    @property
    def usage(self) -> dict[str, int]:
        tokens = sum(map(len, self.answer))
        return {"prompt_tokens": 3, "completion_tokens": tokens, "total_tokens": tokens + 3}

    async def events(self, ticket: Any) -> AsyncIterator[bytes]:
        whole = False
        try:
            yield _event(chunk({"role": "assistant", "content": ""}))
            for place in range(0, len(self.answer), self.merged):
                steps = self.answer[place : place + self.merged]
                if ticket.steps is not None:
                    ticket.steps.extend(map(len, steps))
                tokens = [token for step in steps for token in step]
                logprobs = {"content": [
                    {"token": token, "logprob": 0.0, "bytes": None, "top_logprobs": []}
                    for token in tokens
                ]}  # fmt: skip
                last = place + self.merged >= len(self.answer)
                yield _event(
                    chunk(
                        {"content": "".join(tokens)},
                        finish_reason="stop" if last else None,
                        token_ids=[7] * len(tokens),
                        logprobs=logprobs,
                    )
                )
                await asyncio.sleep(self.pause)
            yield _event({**chunk({}), "choices": [], "usage": self.usage})
            yield b"data: [DONE]\n\n"
            whole = True
        finally:
            if not whole:
                self.left.set()


def _event(value: Any) -> bytes:
    return b"data: " + msgspec.json.encode(value) + b"\n\n"
