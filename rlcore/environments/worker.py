"""A worker process of the environment host: episodes of one environment, one call after the other.

It ends when its parent does, even in the middle of a call. What an environment prints goes to standard
error; the frames have the real standard output to themselves.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from typing import BinaryIO

import msgspec

from rlcore.environments import frames
from rlcore.environments.base import Environment, NonFiniteReward, Split, Task
from rlcore.environments.registry import make
from rlcore.errors import UsageError

NICENESS = 10
"""Serving and training go first; at 19 a sandboxed program would hardly run at all beside them."""

PR_SET_PDEATHSIG = 1
"""prctl(2)."""

MAX_DETAIL = 2000
"""Characters of an exception's text that are passed on."""


class Worker:
    """Instances are kept and used again: making one can take longer than an episode. One that raised,
    or whose episode was closed in the middle, is not."""

    def __init__(self, start: frames.Start) -> None:
        self._start = start
        self._free: list[Environment] = [make(start.spec, start.options)]
        self._running: dict[int, Environment] = {}

    def ready(self) -> frames.Ready:
        first = self._free[0]
        return frames.Ready(first.size("train"), first.size("test"), first.replayable)

    def answer(self, request: frames.Request) -> frames.Answer:
        try:
            return self._answer(request)
        except UsageError as error:
            return frames.Fault("usage", str(error)[:MAX_DETAIL])
        except NonFiniteReward as error:
            return frames.Fault("reward", str(error)[:MAX_DETAIL])
        except (
            Exception
        ) as error:  # the environment's own, whatever it is: its episode ends with it
            return frames.Fault("error", f"{type(error).__name__}: {error}"[:MAX_DETAIL])

    def _answer(self, request: frames.Request) -> frames.Answer:
        match request:
            case frames.GetTask(split, index):
                return frames.TaskIs(self._task(split, index))
            case frames.Reset(episode, task):
                environment = self._take()
                messages = environment.reset(task)
                self._running[episode] = environment
                return frames.Opened(messages)
            case frames.Step(episode, reply):
                environment = self._running.pop(episode)
                turn = environment.step(reply)
                self._running[episode] = environment
                return frames.Took(turn)
            case frames.GetScore(episode):
                environment = self._running.pop(episode)
                score = environment.score()
                self._free.append(environment)
                return frames.Scored(score)
            case frames.Close(episode):
                self._running.pop(episode, None)
                return frames.Closed()
        raise UsageError("a worker is started once")

    def _take(self) -> Environment:
        return self._free.pop() if self._free else make(self._start.spec, self._start.options)

    def _task(self, split: Split, index: int) -> Task:
        environment = self._take()
        self._free.append(environment)
        size = environment.size(split)
        if index < 0 or (size is not None and index >= size):
            raise UsageError(
                f"{environment.spec} has {size} {split} tasks; there is no number {index}"
            )
        return environment.task(split, index)


def die_with(parent: int) -> None:
    """The kernel kills this process when its parent's thread ends."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        sys.exit("the parent is gone")


def serve(stdin: BinaryIO, stdout: BinaryIO) -> None:
    def send(answer: frames.Answer) -> None:
        try:
            frame = frames.pack(answer)
        except (
            frames.FrameTooLarge,
            TypeError,
        ) as error:  # too long, or nothing that msgpack knows
            frame = frames.pack(frames.Fault("error", str(error)))
        stdout.write(frame)
        stdout.flush()

    decoder = msgspec.msgpack.Decoder(frames.Request)
    body = frames.read_frame(stdin)
    if body is None:
        return
    start = decoder.decode(body)
    if not isinstance(start, frames.Start):
        raise TypeError("the first message must be Start")
    die_with(start.parent)
    try:
        worker = Worker(start)
    except UsageError as error:
        send(frames.Fault("usage", str(error)))
        return
    send(worker.ready())
    while (body := frames.read_frame(stdin)) is not None:
        send(worker.answer(decoder.decode(body)))


def main() -> None:
    """Run as ``python -P -m``: modules of the working folder come last, and replace none of ours."""
    os.nice(NICENESS)
    sys.path.append(os.getcwd())
    own_input, own_output = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    with open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    os.dup2(2, 1)
    serve(own_input, own_output)


if __name__ == "__main__":
    main()
