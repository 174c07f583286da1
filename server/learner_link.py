"""The server's side of the link to a learner: says hello, takes announced versions, gives weights.

Losing the learner changes nothing for clients: every send is without waiting, every wait has a
deadline, and the link picks up by itself when a learner is there again.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

import torch
import zmq
import zmq.asyncio

from rlcore.curve import CurveClient
from rlcore.live_drafts import DraftError
from rlcore.log import get_logger
from rlcore.records.learner_link import (
    Announce,
    DraftFiles,
    FetchDraft,
    FetchTarget,
    Hello,
    LearnerMessage,
    LearnerReport,
    Purge,
    Purged,
    Retreat,
    TargetTensors,
    Verdict,
    decode_learner_message,
)
from rlcore.records.wire import RecordError, TensorSpec, encode
from rlcore.target import TargetError, shared_with_drafters
from rlcore.transport import MAX_WEIGHT_FRAME_BYTES, open_socket
from rlcore.weights import WeightError
from server.drafts import Drafts
from server.policy import Policy

log = get_logger("server")

HELLO_INTERVAL = 2.0
FETCH_DEADLINE = 60.0
"""Seconds a learner is given to send the files of a version it announced."""

ALIVE_FOR = 15.0
"""A learner that has not reported for this many seconds counts as gone."""


class LearnerLink:
    """``replay_shares``: how much of what is learned from each tenant may be, at most."""

    def __init__(
        self,
        endpoint: str,
        drafts: Drafts,
        policy: Policy,
        tokens: int,
        curve: CurveClient | None = None,
        replay_shares: Callable[[], dict[str, float]] = dict,
    ) -> None:
        self._socket = open_socket(
            zmq.asyncio.Context.instance(),
            zmq.DEALER,
            endpoint,
            bind=False,
            max_frame_bytes=MAX_WEIGHT_FRAME_BYTES,
            curve=curve,
        )
        self._replay_shares = replay_shares
        self.on_purged: list[Callable[[Purged], None]] = []
        self._drafts = drafts
        self._policy = policy
        self._speculative_tokens = tokens
        self._awaited: dict[int, asyncio.Future[dict[str, bytes]]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self.report: LearnerReport | None = None
        self.reported_at: float | None = None
        self._rest = False
        self.on_report: list[Callable[[], None]] = []
        self.rejected: dict[str, int] = {}
        drafts.on_change.append(self._say_hello_soon)
        policy.on_change.append(self._say_hello_soon)

    @property
    def age(self) -> float | None:
        """Seconds since the learner was last heard of."""
        return None if self.reported_at is None else time.monotonic() - self.reported_at

    @property
    def alive(self) -> bool:
        return self.age is not None and self.age < ALIVE_FOR

    @property
    def computing(self) -> bool:
        """Whether the learner is there and not waiting for anything."""
        return self.alive and self.report is not None and self.report.computing

    def let_rest(self, rest: bool) -> None:
        """Whether the learner is to leave its cores to the model for the time being."""
        if rest != self._rest:
            self._rest = rest
            log.info("the learner rests" if rest else "the learner may go on")
            self._say_hello_soon()

    async def run(self) -> None:
        """Serve the link for ever; cancel to stop."""
        self._start(self._greet())
        while True:
            frames = await self._socket.recv_multipart()
            try:
                message = decode_learner_message(frames[0])
                self._take(message, frames[1:])
            except (RecordError, WeightError) as error:
                self.rejected[error.reason] = self.rejected.get(error.reason, 0) + 1
                log.warning("a learner message was dropped", reason=str(error))

    def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        self._socket.close()

    def _take(self, message: LearnerMessage, frames: list[bytes]) -> None:
        if isinstance(message, LearnerReport):
            self.report, self.reported_at = message, time.monotonic()
            for heard in self.on_report:
                heard()
        elif isinstance(message, Announce):
            self._start(self._promote(message))
        elif isinstance(message, Retreat):
            self._start(self._go_back(message))
        elif isinstance(message, FetchDraft):
            self._start(self._give(message.version))
        elif isinstance(message, FetchTarget):
            self._start(self._give_target(message.version))
        elif isinstance(message, DraftFiles):
            self._receive_files(message, frames)
        elif isinstance(message, Purged):
            for told in self.on_purged:
                told(message)

    def order(self, purge: Purge) -> None:
        """Tell the learner to purge; without one it goes nowhere."""
        self._start(self._send(purge))

    def _receive_files(self, message: DraftFiles, frames: list[bytes]) -> None:
        awaited = self._awaited.pop(message.version, None)
        if awaited is None or awaited.done():
            raise RecordError("unasked", f"files of version {message.version}")
        if message.error is not None:
            awaited.set_exception(WeightError("fetch", message.error))
        elif [len(f) for f in frames] != message.sizes or len(frames) != len(message.names):
            awaited.set_exception(WeightError("fetch", "the files' sizes are not those announced"))
        else:
            awaited.set_result(dict(zip(message.names, frames, strict=True)))

    async def _promote(self, announce: Announce) -> None:
        """Fetch, check, swap, answer. The learner's gate has passed it; this side may still refuse."""
        version = announce.manifest.version
        error, seconds = None, 0.0
        try:
            if version in self._drafts.store.versions():
                raise DraftError(f"version {version} exists already")
            if announce.manifest.parent != self._drafts.live:
                raise DraftError(
                    f"version {version} was judged against version {announce.manifest.parent}, "
                    f"but {self._drafts.live} is live now"
                )
            await self._fetch(version)
            if announce.manifest.parent != self._drafts.live:  # it changed meanwhile
                raise DraftError(f"version {self._drafts.live} went live in the meantime")
            seconds = await self._drafts.activate(version, "promoted")
        except (DraftError, WeightError) as failure:
            error = str(failure)
            log.warning("an announced draft was refused", version=version, reason=error)
        verdict = Verdict(version, error is None, self._drafts.live, error, seconds)
        await self._send(verdict)

    async def _go_back(self, order: Retreat) -> None:
        """The learner's watch found the live version worse than an earlier one."""
        error, seconds = None, 0.0
        try:
            if order.version != self._drafts.live:
                raise DraftError(f"version {order.version} is not live any more")
            seconds = await self._drafts.activate(order.to, "rolled_back", order.reason)
            log.warning("rolled back", version=order.version, live=order.to, reason=order.reason)
        except DraftError as failure:
            error = str(failure)
            log.error("could not roll back", version=order.version, reason=error)
        await self._send(Verdict(order.to, error is None, self._drafts.live, error, seconds))

    async def _fetch(self, version: int) -> None:
        awaited = self._awaited[version] = asyncio.get_running_loop().create_future()
        await self._send(FetchDraft(version))
        try:
            async with asyncio.timeout(FETCH_DEADLINE):
                files = await awaited
        except TimeoutError:
            raise WeightError("fetch", f"version {version} did not come in time") from None
        finally:
            self._awaited.pop(version, None)
        # Digests and disk writes stay off the loop that streams tokens.
        await asyncio.to_thread(self._drafts.store.receive, version, files)

    async def _give(self, version: int) -> None:
        try:
            files = await asyncio.to_thread(self._drafts.store.files, version)
        except WeightError as error:
            await self._send(DraftFiles(version, error=str(error)))
            return
        sizes = [len(content) for content in files.values()]
        await self._send(DraftFiles(version, list(files), sizes), list(files.values()))

    async def _give_target(self, version: int) -> None:
        policy = self._policy
        if version != policy.live:
            answer = TargetTensors(version, error=f"version {policy.live} is live")
            await self._send(answer)
            return
        try:
            tensors = await asyncio.to_thread(shared_with_drafters, policy.checkpoint)
        except TargetError as error:
            log.warning("the learner cannot follow the policy", version=version, reason=str(error))
            await self._send(TargetTensors(version, error=str(error)))
            return
        specs = [
            TensorSpec(name, str(t.dtype).removeprefix("torch."), tuple(t.shape))
            for name, t in tensors.items()
        ]
        frames = [t.contiguous().view(torch.uint8).numpy().tobytes() for t in tensors.values()]
        await self._send(TargetTensors(version, specs), frames)

    async def _greet(self) -> None:
        while True:
            await self._greet_once()
            await asyncio.sleep(HELLO_INTERVAL)

    def _say_hello_soon(self) -> None:
        self._start(self._greet_once())

    async def _greet_once(self) -> None:
        await self._send(
            Hello(
                self._drafts.target_id,
                self._policy.live,
                self._drafts.method,
                self._speculative_tokens,
                self._drafts.live,
                self._drafts.manifest().sha256,
                self._drafts.next_version() - 1,
                self._policy.sha256,
                self._rest,
                self._replay_shares(),
            )
        )

    async def _send(self, message: LearnerMessage, frames: list[bytes] | None = None) -> None:
        try:
            await self._socket.send_multipart(
                [encode(message), *(frames or [])], flags=zmq.NOBLOCK, copy=False
            )
        except zmq.Again:
            log.debug("the learner is away", message=type(message).__name__)

    def _start(self, work) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            log.error("the learner link failed at a task", error=repr(task.exception()))
