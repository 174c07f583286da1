"""``paceline record``: stand in a learner's place and keep the trace stream in a file."""

from __future__ import annotations

import math
import os
import signal
import time

from learner.at_rest import note_recording
from learner.cutoffs import Cutoffs
from learner.inbox import Inbox
from learner.recording import Recorder, RecordingError
from rlcore.curve import curve_server
from rlcore.home import Home
from rlcore.log import get_logger, setup_logging
from rlcore.records.learner_link import Hello, LearnerReport, Purge, PurgeCounts, Purged
from rlcore.records.trace import VerifyTrace
from rlcore.settings import RecordSettings, load
from rlcore.target import local_model, model_identity
from rlcore.transport import EndpointError

log = get_logger("recorder")

REPORT_INTERVAL = 1.0
SWEEP_INTERVAL = 600.0
"""Seconds between two looks for what has been kept long enough."""

LOG_INTERVAL = 60.0


def main(argv: list[str]) -> int:
    settings = load(RecordSettings, argv, "paceline record")
    setup_logging("recorder", settings.log_json, settings.log_level)
    home = Home(settings.home)
    target_id = model_identity(local_model(settings.target, home))
    os.umask(0o077)  # what is kept is text
    curve = curve_server(settings.curve_secret_file, settings.curve_clients_file)
    base = f"ipc://{home.run}/recorder" if settings.bind == "ipc" else settings.bind
    try:
        inbox = Inbox(base, curve)
    except EndpointError as error:
        raise RecordingError(str(error)) from None
    recorder = Recorder(settings.out, target_id, settings.method)
    note_recording(home.learner, settings.out, settings.retention_hours)
    stopping: list[int] = []
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda caught, _: stopping.append(caught))
    log.info("recording", file=str(settings.out), serve_with=f"--learner {base}")
    try:
        _record(settings, inbox, recorder, target_id, stopping)
    except OSError as error:
        raise RecordingError(f"{settings.out} cannot be written on: {error.strerror}") from None
    finally:
        inbox.close()
    log.info("recorded", file=str(settings.out), traces=recorder.records, bytes=recorder.bytes)
    return 0


def _record(
    settings: RecordSettings,
    inbox: Inbox,
    recorder: Recorder,
    target_id: str,
    stopping: list[int],
) -> None:
    """Until a signal comes, or the file is as large as it may be."""
    tokens = 0
    report = LearnerReport(pid=os.getpid(), phase="recording")
    next_report = next_log = next_sweep = time.monotonic()
    cutoffs, oldest = Cutoffs(None), math.inf

    def check(trace: VerifyTrace) -> None:
        """All are kept but what was purged; whether they fit is for the learner to judge."""
        cutoffs.check(trace.tenant, trace.ended)

    taken = True
    # After a signal, what waits in the socket is still taken.
    while (not stopping or taken) and recorder.bytes < settings.max_gib * 2**30:
        for server, message, _ in inbox.messages():
            if isinstance(message, Purge):
                inbox.tell(server, _purge(recorder, cutoffs, message))
            elif isinstance(message, Hello):
                if (message.target_id, message.method) == (target_id, settings.method):
                    inbox.accept(server)
                else:
                    inbox.reject("hello_target")
                    log.warning(
                        "a server of another target or method asks to be recorded",
                        target=message.target_id,
                        method=message.method,
                    )
        arrived = inbox.traces(check)
        taken = bool(arrived)
        for trace, frames in arrived:
            recorder.add(frames)
            oldest = min(oldest, trace.ended)
            tokens += sum(step.accepted + 1 for step in trace.steps)
        report.received, report.rejected = recorder.records, dict(inbox.rejected)
        now = time.monotonic()
        if now >= next_report:
            next_report = now + REPORT_INTERVAL
            inbox.tell_all(report)
        if now >= next_sweep:
            next_sweep = now + SWEEP_INTERVAL
            oldest = _expire(recorder, oldest, time.time() - 3600 * settings.retention_hours)
        if now >= next_log:
            next_log = now + LOG_INTERVAL
            log.info("recorded so far", traces=recorder.records, output_tokens=tokens)
        if not taken and not stopping:
            inbox.wait(200)
    recorder.close()


def _expire(recorder: Recorder, oldest: float, before: float) -> float:
    """When the oldest trace ended that is left; ``oldest``: the same until now."""
    if oldest >= before:
        return oldest
    recorder.delete(lambda trace: trace.ended < before)
    return before


def _purge(recorder: Recorder, cutoffs: Cutoffs, order: Purge) -> Purged:
    try:
        cutoffs.add(order.tenant, order.until)
        deleted = recorder.delete(lambda trace: trace.tenant == order.tenant)
    except OSError as error:
        return Purged(order.purge_id, PurgeCounts(), f"the recording: {error.strerror}")
    return Purged(order.purge_id, PurgeCounts(recorded_traces=deleted))
