"""Signals, and how long requests have to end."""

from __future__ import annotations

import asyncio
import os
import signal
from types import SimpleNamespace
from typing import Any

from server import shutdown
from server.front import Front
from server.overload import Places
from server.shutdown import Stop, drain
from tests.server.asgi import call, http


def test_the_first_signal_asks_and_the_second_one_hurries():
    before = signal.getsignal(signal.SIGTERM)

    async def run() -> None:
        stop = Stop()
        with stop.on_signals():
            os.kill(os.getpid(), signal.SIGTERM)
            await asyncio.wait_for(stop.asked.wait(), 5)
            assert not stop.hurried.is_set()
            os.kill(os.getpid(), signal.SIGINT)
            await asyncio.wait_for(stop.hurried.wait(), 5)

    asyncio.run(run())
    assert signal.getsignal(signal.SIGTERM) is before


class Engine:
    """Ends its requests when told to, if ``obeys``."""

    def __init__(self, obeys: bool = True) -> None:
        self.ended: asyncio.Event = asyncio.Event()
        self.obeys = obeys

    def end_requests(self, reason: str) -> None:
        assert "shutting down" in reason
        if self.obeys:
            self.ended.set()


def drained(takes_s: float, seconds: float, obeys: bool = True, hurry: bool = False) -> list[Any]:
    """What a request gets that would take so long, from a server that drains for so many seconds."""

    async def run() -> list[Any]:
        engine = Engine(obeys)

        async def app(scope: Any, receive: Any, send: Any) -> None:
            status = 200
            try:
                await asyncio.wait_for(engine.ended.wait(), takes_s)
                status = 503
            except TimeoutError:
                pass
            await send({"type": "http.response.start", "status": status, "headers": []})
            await send({"type": "http.response.body", "body": b""})

        front, stop = Front(Places(1, 0), most_body=10, most_fields=10), Stop()
        front.inner = app
        front.change("ready")
        request = asyncio.ensure_future(call(front, http("/v1/x", "POST")))
        await asyncio.sleep(0.01)
        stop.ask()
        if hurry:
            stop.ask()
        begun = asyncio.get_running_loop().time()
        await drain(front, SimpleNamespace(llm=engine), stop, seconds)  # type: ignore[arg-type]
        sent = await request
        return [sent[0]["status"], asyncio.get_running_loop().time() - begun]

    return asyncio.run(run())


def test_a_request_that_ends_in_time_is_waited_for():
    status, seconds = drained(takes_s=0.3, seconds=5)
    assert status == 200
    assert seconds < 2


def test_a_request_that_does_not_is_ended_and_answers_for_itself():
    status, seconds = drained(takes_s=60, seconds=0.2)
    assert status == 503
    assert seconds < 2


def test_one_that_does_not_even_end_then_is_cut(monkeypatch):
    monkeypatch.setattr(shutdown, "LAST_WORDS", 0.3)
    status, seconds = drained(takes_s=60, seconds=0.2, obeys=False)
    assert status == 503
    assert seconds < 2


def test_a_second_signal_waits_for_nobody():
    status, seconds = drained(takes_s=60, seconds=60, hurry=True)
    assert status == 503
    assert seconds < 2
