"""``paceline learn``: a learner on its own, for another process; with ``--replay``, from recordings."""

from __future__ import annotations

import os
import signal

from learner.objectives.named import recipe
from learner.recording import Recording
from rlcore.curve import curve_server
from rlcore.errors import PacelineError
from rlcore.home import Home
from rlcore.log import get_logger, setup_logging
from rlcore.parent import end_with_parent
from rlcore.settings import LearnSettings, ReplaySettings, load
from rlcore.target import local_model, model_identity
from rlcore.transport import EndpointError

log = get_logger("learner")


class LearnError(PacelineError):
    """The learner cannot start like this."""


def main(argv: list[str]) -> int:
    if any(word.split("=")[0] == "--replay" for word in argv):
        return _rehearse(load(ReplaySettings, argv, "paceline learn --replay"))
    settings = load(LearnSettings, argv, "paceline learn")
    setup_logging("learner", settings.log_json, settings.log_level)
    if settings.parent_pid is not None:
        end_with_parent(settings.parent_pid)
    home = Home(settings.home)
    with home.lock("learn"):
        return _learn(settings, home)


def _rehearse(settings: ReplaySettings) -> int:
    setup_logging("learner", settings.log_json, settings.log_level)
    recipe(settings.objective)  # a name that is not there is said at once
    if settings.out.exists():
        raise LearnError(f"{settings.out} exists; give --out a new folder")
    recordings = [Recording(path, cut_ok=settings.cut_ok) for path in settings.replay]
    home = Home(settings.home)
    folder = local_model(settings.target, home)

    from learner.rehearsal import rehearse
    from learner.session import keep_freed_memory, use_threads
    from learner.target import Target

    os.nice(settings.nice)
    use_threads(settings.threads)
    keep_freed_memory()
    facts = rehearse(settings, recordings, Target.open(folder), model_identity(folder), home)
    log.info("learned", folder=str(settings.out), **facts)
    return 0


def _learn(settings: LearnSettings, home: Home) -> int:
    recipe(settings.objective)  # a name that is not there is said at once
    folder = local_model(settings.target, home)
    target_id = model_identity(folder)

    from learner.service import Learner
    from learner.session import keep_freed_memory, use_threads
    from learner.target import Target

    use_threads(settings.threads)
    keep_freed_memory()
    os.umask(0o077)  # what it keeps is text
    curve = curve_server(settings.curve_secret_file, settings.curve_clients_file)
    base = f"ipc://{home.run}/learner" if settings.bind == "ipc" else settings.bind
    work = home.learner / f"{target_id}-{settings.method}"
    work.mkdir(parents=True, exist_ok=True)
    try:
        learner = Learner(settings, work, Target.open(folder), target_id, base, curve)
    except EndpointError as error:
        raise LearnError(str(error)) from None
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: learner.stop())
    # Only now: at low priority the imports above could take minutes beside a busy server.
    os.nice(settings.nice)
    learner.run()
    return 0
