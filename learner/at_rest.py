"""Everything of traces that lies in a home folder besides the running learner's own replay.

Replays of other targets, which wait for their server to come back, and recordings: ``paceline record``
leaves a note of each in the learner's folder, so that retention and purges reach it wherever it lies.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path

import msgspec

from learner.cutoffs import write_private
from learner.journal import Journal
from learner.recording import RecordingError, delete_from
from rlcore.log import get_logger
from rlcore.records import VerifyTrace

log = get_logger("learner")

NOTES = "recordings"
UNBOUNDED = 2**63


class _Note(msgspec.Struct, frozen=True):
    """One recording that was made."""

    path: str
    retention_hours: float


def note_recording(learner_folder: Path, path: Path, retention_hours: float) -> None:
    """Have retention and purges reach a recording. Raises OSError."""
    folder = learner_folder / NOTES
    folder.mkdir(exist_ok=True, mode=0o700)
    whole = str(path.absolute())
    name = hashlib.sha256(whole.encode()).hexdigest()[:32]
    write_private(folder / f"{name}.json", msgspec.json.encode(_Note(whole, retention_hours)))


class AtRest:
    """``learner_folder``: the home's; ``own``: the running learner's folder in it, which is left alone."""

    def __init__(self, learner_folder: Path, own: Path) -> None:
        self._folder = learner_folder
        self._own = own

    def purge(self, tenant: str) -> tuple[int, int]:
        """(traces in replays, traces in recordings) that were deleted. Raises OSError."""

        def of_tenant(trace: VerifyTrace) -> bool:
            return trace.tenant == tenant

        return self._journals(of_tenant), self._recordings(lambda _: of_tenant)

    def expire(self, now: float, retention_hours: float) -> tuple[int, int]:
        """The same for what ended longer ago than it may be kept: so many hours in replays, and in
        each recording as many as its recorder was told. ``now``: seconds since the epoch."""

        def older(hours: float) -> Callable[[VerifyTrace], bool]:
            return lambda trace: trace.ended < now - 3600 * hours

        return self._journals(older(retention_hours)), self._recordings(older)

    def _journals(self, unwanted: Callable[[VerifyTrace], bool]) -> int:
        folders = self._folder.glob("*/replay")
        others = [folder for folder in folders if folder.parent != self._own]
        return sum(Journal(folder, UNBOUNDED).delete(unwanted) for folder in others)

    def _recordings(self, unwanted: Callable[[float], Callable[[VerifyTrace], bool]]) -> int:
        deleted = 0
        for place in sorted((self._folder / NOTES).glob("*.json")):
            try:
                note = msgspec.json.decode(place.read_bytes(), type=_Note)
                deleted += delete_from(Path(note.path), unwanted(note.retention_hours))
            except FileNotFoundError:
                place.unlink(missing_ok=True)  # its owner has deleted it
            except (msgspec.DecodeError, RecordingError, ValueError) as error:
                log.error(
                    "a recording cannot be looked through", note=str(place), reason=str(error)
                )
        return deleted
