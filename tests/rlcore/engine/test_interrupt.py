"""Who takes Ctrl-C."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys

from rlcore.engine.interrupt import leave_interrupts_to_parent


def in_engine() -> None:
    """Of a process that multiprocessing has started."""
    leave_interrupts_to_parent()
    os.kill(os.getpid(), signal.SIGINT)
    sys.exit(7)


def test_an_engine_process_lives_through_an_interrupt_and_its_parent_is_left_as_it_was():
    before = signal.getsignal(signal.SIGINT)
    process = multiprocessing.get_context("spawn").Process(target=in_engine)
    process.start()
    process.join(60)
    assert process.exitcode == 7
    leave_interrupts_to_parent()
    assert signal.getsignal(signal.SIGINT) is before
