"""Work that goes on beside serving, and ends with it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Coroutine, Iterable
from typing import Any

from rlcore.log import get_logger

log = get_logger("server")


@contextlib.asynccontextmanager
async def running(work: Iterable[Coroutine[Any, Any, None]]) -> AsyncIterator[None]:
    """Inside, all of it runs; what fails is logged, and the rest goes on."""
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
