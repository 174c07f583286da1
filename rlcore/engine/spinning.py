"""Stops vLLM's processes from spinning while they wait for each other on a CPU.

Read against vLLM 0.32.0: ``shm_broadcast.SpinCondition`` yields in a loop for up to a second before it
sleeps on its socket. Where the model runs on the same few cores, the engine core so burns a whole core
during every step, and a learner at low priority gets almost none of it.

Sleeping on the socket alone is not enough: its notifications can be lost (PUB with a high water mark
of 1), which the spinning hides. So a waiter also looks for itself, often while there is traffic.
"""

from __future__ import annotations

import time
from typing import Any

BUSY_SECONDS = 1.0
"""As vLLM: this long after a read, the next message is expected soon."""

BUSY_WAIT_MS, IDLE_WAIT_MS = 1, 50
"""Longest sleep without a look at the buffer. A step takes tens of milliseconds."""


def wait_without_spinning() -> None:
    """Idempotent. Does nothing on a GPU, where a step is short and cores are many."""
    from vllm.distributed.device_communicators.shm_broadcast import SpinCondition
    from vllm.platforms import current_platform

    if not current_platform.is_cpu() or SpinCondition.wait is _wait:
        return
    global _original_wait
    _original_wait = SpinCondition.wait
    SpinCondition.wait = _wait


_original_wait: Any = None


def _wait(self: Any, timeout_ms: int | None = None) -> None:
    busy = time.monotonic() <= self.last_read + BUSY_SECONDS
    longest = BUSY_WAIT_MS if busy else IDLE_WAIT_MS
    self.busy_loop_s = -1.0  # past at once: vLLM's wait then polls its sockets
    _original_wait(self, longest if timeout_ms is None else min(timeout_ms, longest))
