"""Everything of traces that lies in a home folder besides the running learner's own replay.

Replays of other targets, which wait for their server to come back, and recordings: ``paceline record``
leaves a note of each in the learner's folder, so that retention and purges reach it wherever it lies.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path

import msgspec

from learner.cutoffs import Oldest, write_private
from learner.journal import Journal
from learner.recording import RecordingError, delete_from, traces_of
from rlcore.log import get_logger
from rlcore.records.trace import VerifyTrace

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
        self._journals: dict[Path, Journal] = {}
        self._oldest = Oldest()

    def purge(self, tenant: str) -> tuple[int, int]:
        """(traces in replays, traces in recordings) that were deleted. Raises OSError."""

        def of_tenant(trace: VerifyTrace) -> bool:
            return trace.tenant == tenant

        journals = sum(journal.delete(of_tenant) for journal in self._others())
        return journals, self._recordings(lambda path, _: delete_from(path, of_tenant))

    def expire(self, now: float, retention_hours: float) -> tuple[int, int]:
        """The same for what ended longer ago than it may be kept: so many hours in replays, and in
        each recording as many as its recorder was told. ``now``: seconds since the epoch."""

        def expire(path: Path, hours: float) -> int:
            before = now - 3600 * hours
            if not self._oldest.may_be(path, before):
                return 0
            deleted = delete_from(path, lambda trace: trace.ended < before)
            self._oldest.note(path, (trace.ended for trace in traces_of(path)))
            return deleted

        before = now - 3600 * retention_hours
        journals = sum(journal.expire(before) for journal in self._others())
        return journals, self._recordings(expire)

    def _others(self) -> list[Journal]:
        for folder in self._folder.glob("*/replay"):
            if folder.parent != self._own and folder not in self._journals:
                self._journals[folder] = Journal(folder, UNBOUNDED)
        return list(self._journals.values())

    def _recordings(self, work: Callable[[Path, float], int]) -> int:
        """The sum of what ``work`` gives back for each recording and the hours it may be kept."""
        deleted = 0
        for place in sorted((self._folder / NOTES).glob("*.json")):
            try:
                note = msgspec.json.decode(place.read_bytes(), type=_Note)
                deleted += work(Path(note.path), note.retention_hours)
            except FileNotFoundError:
                place.unlink(missing_ok=True)  # its owner has deleted it
            except (msgspec.DecodeError, RecordingError, ValueError) as error:
                log.error(
                    "a recording cannot be looked through", note=str(place), reason=str(error)
                )
        return deleted
