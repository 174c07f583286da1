"""Ctrl-C in a terminal reaches all of a server's processes, and an engine that ends takes its requests along.

What started the engine ends it, when the requests have ended (see ``server.shutdown``).
"""

from __future__ import annotations

import multiprocessing
import signal
import threading


def leave_interrupts_to_parent() -> None:
    """Ignore SIGINT in an engine process. vLLM 0.32 has set its own handler by then; SIGTERM stays its."""
    if multiprocessing.parent_process() is None:
        return
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, signal.SIG_IGN)
