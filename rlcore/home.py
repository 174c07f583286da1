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

    def _folder(self, name: str) -> Path:
        _private(self.root)  # mkdir gives parents that it makes the umask's mode
        return _private(self.root / name)

    @property
    def models(self) -> Path:
        return self._folder("models")

    @property
    def drafts(self) -> Path:
        return self._folder("drafts")

    @property
    def learner(self) -> Path:
        return self._folder("learner")

    @property
    def run(self) -> Path:
        """For sockets; elsewhere when the home's own path is too long for one."""
        folder = self.root.absolute() / "run"
        if len(os.fsencode(folder)) > LONGEST_SOCKET_FOLDER:
            digest = hashlib.sha256(os.fsencode(self.root.absolute())).hexdigest()[:16]
            folder = Path(tempfile.gettempdir()) / f"paceline-{os.getuid()}-{digest}"
            _private(folder)
            if folder.lstat().st_uid != os.getuid():
                raise PacelineError(f"{folder} belongs to another user; choose a shorter --home")
            return folder
        return self._folder("run")

    @contextmanager
    def lock(self, name: str, *, wait: bool = False) -> Iterator[None]:
        """Held within. When another holds it: raises HomeInUse, naming the process, or waits."""
        path = _private(self.root) / f"{name}.lock"
        with open(path, "a+") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
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
