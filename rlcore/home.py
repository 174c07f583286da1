"""PACELINE_HOME: the folder with models, drafts, the learner's state and sockets."""

from __future__ import annotations

import fcntl
import hashlib
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from rlcore.errors import PacelineError

LONGEST_SOCKET_FOLDER = 80
"""Characters; a unix socket's whole path may have 107 bytes."""


class HomeInUse(PacelineError):
    """Another process holds this home folder."""


def default_home() -> Path:
    """PACELINE_HOME, or ``paceline`` in the user's cache folder."""
    if home := os.environ.get("PACELINE_HOME"):
        return Path(home)
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "paceline"


def _private(folder: Path) -> Path:
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError as error:
        raise PacelineError(
            f"cannot use the folder {folder} ({error.strerror}); choose another with --home"
        ) from None
    return folder


@dataclass(frozen=True)
class Home:
    """Folders are made when first asked for, readable by their owner only."""

    root: Path

    @property
    def models(self) -> Path:
        return _private(self.root / "models")

    @property
    def drafts(self) -> Path:
        return _private(self.root / "drafts")

    @property
    def learner(self) -> Path:
        return _private(self.root / "learner")

    @property
    def run(self) -> Path:
        """For sockets; elsewhere when the home's own path is too long for one."""
        folder = self.root.absolute() / "run"
        if len(os.fsencode(folder)) > LONGEST_SOCKET_FOLDER:
            digest = hashlib.sha256(os.fsencode(self.root.absolute())).hexdigest()[:16]
            folder = Path(tempfile.gettempdir()) / f"paceline-{os.getuid()}-{digest}"
            _private(folder)
            if folder.stat().st_uid != os.getuid():
                raise PacelineError(f"{folder} belongs to another user; choose a shorter --home")
        return _private(folder)

    @contextmanager
    def lock(self, name: str) -> Iterator[None]:
        """Held within; raises HomeInUse, naming the process, when another holds it."""
        path = _private(self.root) / f"{name}.lock"
        with open(path, "a+") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                file.seek(0)
                holder = file.read().strip() or "another process"
                raise HomeInUse(
                    f"the home folder {self.root} is in use by process {holder} ({name}); "
                    "stop it, or give another folder with --home"
                ) from None
            file.truncate(0)
            file.write(str(os.getpid()))
            file.flush()
            yield
