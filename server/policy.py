"""Which policy is live: checks, swaps, remembers. A policy is a version of the target's weights, or a
LoRA adapter of it where the server was started for those.

One swap at a time; what is refused changes nothing. The server's own target is the first version, and a
restart serves it again: whoever trains the policy holds its versions, and publishes the last one anew.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections import deque
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec

from rlcore.errors import PacelineError
from rlcore.log import get_logger
from rlcore.weights import ADAPTER_CONFIG, ADAPTER_WEIGHTS, CONFIG, WEIGHTS, WeightError

log = get_logger("server")

TARGET_VERSION = 0
"""The served target's; policies published to the running server count on from it."""

REMEMBERED_SWAPS = 1000

IGNORED = frozenset({"_name_or_path", "dtype", "torch_dtype", "transformers_version", "use_cache"})
"""Keys of config.json, with all ``*_token_id``, that do not change what the weights compute."""

Swap = Callable[[str, str, int], Awaitable[dict[str, Any]]]
"""(folder, sha256, version) -> the fields of a PolicySwap; raises WeightError when the old one serves on."""


class PolicyError(PacelineError):
    """A version that cannot be made live; the live one is untouched."""


class EngineGone(PolicyError):
    """There is no engine to give it to."""


class PolicySwap(msgspec.Struct, frozen=True):
    """One version that went live, and what that cost."""

    version: int
    sha256: str
    at: float
    """Seconds since the epoch."""
    stall_seconds: float
    """From the order to stop until the engine went on: the step at hand is in it."""
    apply_seconds: float
    """Of that, the exchange of the weights."""
    stage_seconds: float
    """Reading and checking the file, while requests were served."""
    frozen_requests: int
    """Requests that had begun to answer and went on under the new version."""
    frozen_tokens: int
    """Their tokens, prompt and output, which were computed again."""
    nbytes: int = 0
    """Size of the weights file."""
    adapter: bool = False
    """Whether it is a LoRA adapter of the target, or a whole checkpoint."""


class Policy:
    """The versions that were live since the start, and the one that serves."""

    def __init__(self, target: Path, version: int, *, adapters: bool = False) -> None:
        """``adapters``: its versions are adapters of the target, and not whole checkpoints."""
        self._target = target
        self.adapters = adapters
        self._first = version
        self.folder = target
        """Where the live version came from."""
        self.live = version
        self.sha256 = ""
        """Of the live version's weights; empty for the server's own target."""
        self.swaps: deque[PolicySwap] = deque(maxlen=REMEMBERED_SWAPS)
        self.count = 0
        self.failed: dict[str, int] = {}
        self.stall_seconds = 0.0
        """Summed over all swaps."""
        self.on_change: list[Callable[[], None]] = []
        self._lock = asyncio.Lock()
        self._swap: Swap | None = None

    @property
    def checkpoint(self) -> Path:
        """With the embedding, norm and head that serve: an adapter has none of its own."""
        return self._target if self.adapters else self.folder

    def connect(self, swap: Swap) -> None:
        """Give it the engine."""
        self._swap = swap

    async def publish(self, folder: Path, version: int, sha256: str) -> PolicySwap:
        """Make the Hugging Face checkpoint, or adapter, in ``folder`` the live version.

        ``sha256``: of its weights file. Raises PolicyError.
        """
        if self._lock.locked():
            raise self._refused(version, WeightError("busy", "another version is on its way"))
        async with self._lock:
            if self._swap is None:
                raise EngineGone("the engine is not up yet")
            try:
                if version <= self.live:
                    raise WeightError("old", f"version {self.live} is live; count on from there")
                await asyncio.to_thread(self._check_folder, folder)
                report = await self._swap(str(folder), sha256, version)
            except WeightError as error:
                raise self._refused(version, error) from None
            except Exception as error:  # whatever vLLM raises when its engine is gone
                self.failed["engine"] = self.failed.get("engine", 0) + 1
                raise EngineGone(f"the engine could not be asked: {error}") from error
            swap = PolicySwap(
                version=version,
                sha256=sha256,
                at=time.time(),
                nbytes=_size(folder / (ADAPTER_WEIGHTS if self.adapters else WEIGHTS)),
                adapter=self.adapters,
                **report,
            )
            self.folder, self.live, self.sha256 = folder, version, sha256
            self.swaps.append(swap)
            self.count += 1
            self.stall_seconds += swap.stall_seconds
            log.info(
                "policy swapped",
                live=version,
                stall_ms=round(swap.stall_seconds * 1000),
                frozen_requests=swap.frozen_requests,
            )
        for changed in self.on_change:
            changed()
        return swap

    def disconnect(self) -> None:
        """The engine is gone; until there is another one, nothing is published."""
        self._swap = None

    async def restore(self, swap: Swap) -> None:
        """Bring a new engine, which serves the server's own target, to the version that was live.

        Where its checkpoint cannot be loaded any more, the server's own target serves: what nobody can
        reproduce is not kept in name. Whoever trains publishes the next version as ever.
        """
        async with self._lock:
            if self.live == self._first:
                return
            try:
                await swap(str(self.folder), self.sha256, self.live)
                log.info("the live policy was loaded again", live=self.live)
                return
            except WeightError as error:
                self.failed[error.reason] = self.failed.get(error.reason, 0) + 1
                log.error(
                    "the live policy cannot be loaded again; the server's own target serves",
                    lost=self.live, live=self._first, reason=str(error),
                )  # fmt: skip
            self.folder, self.live, self.sha256 = self._target, self._first, ""
        for changed in self.on_change:
            changed()

    def _check_folder(self, folder: Path) -> None:
        """Raises WeightError unless it is of the kind that is served."""
        is_adapter = (folder / ADAPTER_CONFIG).is_file()
        if is_adapter and not self.adapters:
            raise WeightError(
                "kind",
                f"{folder} holds a LoRA adapter; to take those start the server with --policy-lora-rank",
            )
        if self.adapters and not is_adapter and (folder / CONFIG).is_file():
            raise WeightError(
                "kind",
                f"{folder} holds a whole checkpoint; this server takes adapters (--policy-lora-rank)",
            )
        if self.adapters:
            check_adapter_folder(folder)
        else:
            check_folder(folder, self._target)

    def _refused(self, version: int, error: WeightError) -> PolicyError:
        self.failed[error.reason] = self.failed.get(error.reason, 0) + 1
        log.warning("policy refused; the old one serves on", version=version, reason=str(error))
        return PolicyError(f"policy version {version} was refused: {error}")


def _size(path: Path) -> int:
    """0 when whoever wrote it has removed it since."""
    try:
        return path.stat().st_size
    except OSError:
        return 0


def check_folder(folder: Path, target: Path) -> None:
    """Raises WeightError unless ``folder`` holds one weights file, for a model like the target."""
    if not folder.is_absolute():
        raise WeightError("unreadable", f"{folder} is not an absolute path")
    if not (folder / WEIGHTS).is_file():
        raise WeightError("unreadable", f"{folder} holds no {WEIGHTS} (one file, not shards)")
    got, want = _config(folder), _config(target)
    for key in sorted(got.keys() & want.keys()):
        if key not in IGNORED and not key.endswith("_token_id") and got[key] != want[key]:
            raise WeightError(
                "config", f"{key} in {CONFIG} is {got[key]!r}, of the target it is {want[key]!r}"
            )


def check_adapter_folder(folder: Path) -> None:
    """Raises WeightError unless ``folder`` holds an adapter's configuration and one weights file."""
    if not folder.is_absolute():
        raise WeightError("unreadable", f"{folder} is not an absolute path")
    for name in (ADAPTER_CONFIG, ADAPTER_WEIGHTS):
        if not (folder / name).is_file():
            raise WeightError("unreadable", f"{folder} holds no {name}")


def _config(folder: Path) -> dict[str, Any]:
    try:
        return msgspec.convert(json.loads((folder / CONFIG).read_bytes()), dict[str, Any])
    except OSError as error:
        raise WeightError("unreadable", f"{folder / CONFIG}: {error.strerror}") from None
    except (ValueError, RecursionError, msgspec.ValidationError) as error:
        raise WeightError("malformed", f"{folder / CONFIG}: {error}") from None
