"""A version of the policy that is read and checked beside the engine's steps, and applied between two."""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Generic, TypeVar

import msgspec
import torch

from rlcore.engine.slot import Slot, SwapReport
from rlcore.weights import WeightError

C = TypeVar("C")
"""What is known of a version that passed all checks."""


class StageReport(msgspec.Struct, frozen=True):
    """How far the reading of a version has come."""

    version: int
    ready: bool = False
    reason: str | None = None
    """Short word for why it cannot be used, a metric label; None while it is read."""
    error: str | None = None


class StagedSlot(Slot, ABC, Generic[C]):
    """The place in the engine that holds the policy, whatever a version of it is made of."""

    _staging: _Staging[C] | None = None

    @abstractmethod
    def check(self, folder: Path, sha256: str) -> C:
        """A version, fit to be made live; raises WeightError. Runs in a thread of its own."""

    @abstractmethod
    def make_live(self, checked: C, version: int) -> SwapReport:
        """Exchange it for the live one, or leave that as it was."""

    def stage(self, folder: Path, sha256: str, version: int) -> None:
        """Begin to read a version; raises WeightError while another one is being read."""
        if self._staging is not None and self._staging.is_alive():
            raise WeightError("busy", f"version {self._staging.version} is still being read")
        self._staging = _Staging(self, folder, sha256, version)
        self._staging.start()

    def staged(self, version: int) -> StageReport:
        staging = self._staging
        if staging is None or staging.version != version:
            return StageReport(version, False, "not_staged", "nobody asked for it to be read")
        if staging.is_alive():
            return StageReport(version)
        if staging.error is not None:
            return StageReport(version, False, staging.error.reason, str(staging.error))
        return StageReport(version, True)

    def swap(self, version: int) -> SwapReport:
        """Make the staged version live, or leave everything as it was."""
        started = time.perf_counter()
        state, staging = self.staged(version), self._staging
        if not state.ready:
            return self.report(version, started, state.reason or "busy", state.error or "unread")
        self._staging = None
        assert staging is not None
        assert staging.checked is not None
        return self.make_live(staging.checked, version)


class _Staging(threading.Thread, Generic[C]):
    """Reads one version. ``checked`` or ``error`` is set when it has ended."""

    def __init__(self, slot: StagedSlot[C], folder: Path, sha256: str, version: int) -> None:
        super().__init__(name="paceline-policy", daemon=True)
        self._slot = slot
        self._folder = folder
        self._sha256 = sha256
        self.version = version
        self.checked: C | None = None
        self.error: WeightError | None = None

    def run(self) -> None:
        # For this thread alone: helpers would take the cores from the step's own threads.
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            self.checked = self._slot.check(self._folder, self._sha256)
        except WeightError as error:
            self.error = error
        except Exception as error:  # its end is asked for by polling: it must leave word
            self.error = WeightError("stage", f"{type(error).__name__}: {error}")
        finally:
            torch.set_num_threads(threads)  # what threads that start later begin with
