"""``paceline learn``: a learner on its own, for another process."""

from __future__ import annotations

import ctypes
import os
import signal

from rlcore.errors import PacelineError
from rlcore.home import Home
from rlcore.log import get_logger, setup_logging
from rlcore.settings import LearnSettings, load
from rlcore.target import local_model, model_identity
from rlcore.transport import EndpointError

log = get_logger("learner")


class LearnError(PacelineError):
    """The learner cannot start like this."""


def main(argv: list[str]) -> int:
    settings = load(LearnSettings, argv, "paceline learn")
    setup_logging("learner", settings.log_json, settings.log_level)
    if settings.parent_pid is not None:
        _end_with(settings.parent_pid)
    home = Home(settings.home)
    with home.lock("learn"):
        return _learn(settings, home)


def _end_with(parent_pid: int) -> None:
    """Have the kernel send SIGTERM when the process that started this one is gone (Linux prctl)."""
    set_parent_death_signal = 1  # PR_SET_PDEATHSIG
    ctypes.CDLL(None, use_errno=True).prctl(set_parent_death_signal, signal.SIGTERM)
    if os.getppid() != parent_pid:
        raise LearnError("the server that started this learner is gone")


def _learn(settings: LearnSettings, home: Home) -> int:
    folder = local_model(settings.target, home)
    target_id = model_identity(folder)

    from learner.service import Learner
    from learner.session import use_threads
    from learner.target import Target

    use_threads(settings.threads)
    base = f"ipc://{home.run}/learner" if settings.bind == "ipc" else settings.bind
    work = home.learner / f"{target_id}-{settings.method}"
    work.mkdir(parents=True, exist_ok=True)
    try:
        learner = Learner(settings, work, Target.open(folder), target_id, base)
    except EndpointError as error:
        raise LearnError(str(error)) from None
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: learner.stop())
    # Only now: at low priority the imports above could take minutes beside a busy server.
    os.nice(settings.nice)
    learner.run()
    return 0
