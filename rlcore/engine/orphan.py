"""An engine process that outlives the one that started it would hold memory and cores for nothing.

vLLM 0.32 ends its processes when the one that started them ends in order, not when that is killed.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time

GRACE = 10.0
"""Seconds to end in order."""

_watching = False


def end_with_parent_process() -> None:
    """Idempotent. Does nothing in a process that multiprocessing has not started."""
    global _watching
    if _watching or multiprocessing.parent_process() is None:
        return
    _watching = True
    threading.Thread(target=_watch, name="paceline-orphan", daemon=True).start()


def _watch() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(GRACE)
    os.kill(os.getpid(), signal.SIGKILL)
