"""The target as it moves: under policy learning a server serves one version of it after the other.

Of a version the learner needs the embedding, the head and the final norm; they come over the control
link, so that a learner on another machine can follow too.

With each version the replay starts anew. Traces of the one before hold its hidden states and the normaliser
of its logits: a drafter trained on them would move towards what that version said, and the hidden states it
is given in serving are no longer those. Version by version the difference is small, but a replay holds many
versions. The price: where a version is live for too short to fill a batch, nothing is learned from it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from learner.inbox import Inbox
from learner.target import Target
from rlcore.log import get_logger
from rlcore.records.learner_link import FetchTarget, Hello, TargetTensors
from rlcore.records.wire import DTYPE_BYTES, RecordError
from rlcore.transport import Frame

log = get_logger("learner")

FETCH_INTERVAL = 5.0
"""Seconds between two requests for one version's tensors."""


class MovingTarget:
    """Knows which version is here and which one is on its way; calls ``moved`` with each new one."""

    def __init__(self, base: Target, inbox: Inbox, moved: Callable[[Target, int], None]) -> None:
        self._base = base
        """The model that the learner was started with; a version without a digest is this one."""
        self._inbox = inbox
        self._moved = moved
        self._here = (0, "")
        """Version and digest."""
        self._asked: tuple[bytes, int, str] | None = None
        """(server, version, digest)"""
        self._next_fetch = 0.0

    def follow(self, server: bytes, hello: Hello, now: float) -> bool:
        """False while what the server serves is not here; it is then asked for it."""
        named = (hello.target_version, hello.target_sha256)
        if named == self._here:
            return True
        if not hello.target_sha256:
            self._asked = None
            self._move(self._base, hello.target_version, "")
            return True
        if (server, *named) != self._asked or now >= self._next_fetch:
            self._asked, self._next_fetch = (server, *named), now + FETCH_INTERVAL
            self._inbox.tell(server, FetchTarget(hello.target_version))
        return False

    def receive(self, server: bytes, message: TargetTensors, frames: Sequence[Frame]) -> None:
        """A server's answer. One that nobody asked for, or that does not fit, is counted."""
        if self._asked is None or self._asked[:2] != (server, message.version):
            self._inbox.reject("unasked")
            return
        if message.error is not None:  # asked for again in a while
            log.warning(
                "the target's version could not be fetched; its traffic is not learned from",
                version=message.version,
                reason=message.error,
            )
            return
        try:
            target = self._read(message, frames)
        except RecordError as error:
            self._inbox.reject(error.reason)
            log.warning("the target's version was refused", reason=str(error))
            return
        sha256, self._asked = self._asked[2], None
        self._move(target, message.version, sha256)

    def _move(self, target: Target, version: int, sha256: str) -> None:
        self._here = (version, sha256)
        self._moved(target, version)
        log.info("the target has moved", version=version)

    def _read(self, message: TargetTensors, frames: Sequence[Frame]) -> Target:
        base = self._base
        want = {"embedding": base.embedding.shape, "final_norm": base.final_norm.shape}
        if base.lm_head is not base.embedding:
            want["lm_head"] = base.lm_head.shape
        got = {spec.name: spec for spec in message.tensors}
        if {name: tuple(shape) for name, shape in want.items()} != {
            name: spec.shape for name, spec in got.items()
        }:
            raise RecordError("tensors", f"{message.tensors} do not fit the target")
        tensors = {}
        for spec, frame in zip(message.tensors, frames, strict=False):
            if spec.dtype not in DTYPE_BYTES or len(frame) != spec.nbytes:
                raise RecordError("frames", f"{spec.name}: {len(frame)} bytes, dtype {spec.dtype}")
            flat = torch.frombuffer(bytearray(frame), dtype=getattr(torch, spec.dtype))
            tensors[spec.name] = flat.view(spec.shape).float()
        if len(tensors) != len(want) or len(frames) != len(want):
            raise RecordError("frames", f"{len(frames)} frames for {len(want)} tensors")
        if not all(bool(tensor.isfinite().all()) for tensor in tensors.values()):
            raise RecordError("not_finite", "a tensor of the target holds NaN or infinity")
        return base.moved(**tensors)
