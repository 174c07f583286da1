"""A child process that must not outlive the one that started it."""

from __future__ import annotations

import ctypes
import os
import signal
import sys

from rlcore.errors import PacelineError

PR_SET_PDEATHSIG = 1


class ParentGone(PacelineError):
    """The process that started this one has ended."""


def end_with_parent(pid: int) -> None:
    """Have the kernel send SIGTERM when the process that started this one is gone (Linux prctl).

    ``pid``: of that process; raises ParentGone when it has ended already.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    if os.getppid() != pid:
        raise ParentGone("the process that started this one is gone")
