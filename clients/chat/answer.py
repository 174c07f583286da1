"""One streamed answer: its pieces as they come, and what is known of it in the end."""

from __future__ import annotations

import time
from collections.abc import Generator
from dataclasses import dataclass, field
from typing import Any

from openai.types.chat import ChatCompletionChunk

from clients.answers import PacelineUsage, usage_of
from clients.chat.pieces import Piece, Pieces, origins
from clients.client import PacelineClient, request_headers

STEPS_HEADERS = {"x-paceline-steps": "true"}
"""Every chunk says how many of its tokens each step emitted; chunks alone do not, they are merged."""

Messages = list[dict[str, str]]


@dataclass(frozen=True)
class Options:
    """Of every request; None leaves the choice to the server."""

    model: str
    max_tokens: int | None = None
    temperature: float | None = None
    learn: bool | None = None


@dataclass
class Answer:
    """Filled while the answer streams. Times are of ``time.perf_counter``."""

    text: str = ""
    steps: list[int] = field(default_factory=list)
    """Tokens that each step emitted, as far as the server said."""
    tokens: int = 0
    started: float = 0.0
    first_token: float | None = None
    last_token: float = 0.0
    first_tokens: int = 0
    """That came with the first chunk."""
    usage: PacelineUsage | None = None
    finish_reason: str | None = None

    @property
    def accepted(self) -> int:
        """Tokens that are accepted drafts."""
        return sum(origins(self.steps))

    @property
    def tokens_per_second(self) -> float | None:
        """After the first chunk; None if there was no other."""
        if self.first_token is None or self.last_token <= self.first_token:
            return None
        return (self.tokens - self.first_tokens) / (self.last_token - self.first_token)

    def summary(self) -> str:
        """In one line."""
        parts = [f"{self.tokens} token{'' if self.tokens == 1 else 's'}"]
        if self.steps:
            parts[0] += f", {self.accepted} of them drafts"
        if self.tokens_per_second is not None:
            parts.append(f"{self.tokens_per_second:.1f} tokens/s")
        if self.usage is not None:
            if self.usage.length is not None:
                parts.append(f"acceptance length {self.usage.length:.2f}")
            versions = [count.version for count in self.usage.versions if count.version >= 0]
            if versions:
                parts.append(f"draft {', '.join(map(str, versions))}")
        if self.finish_reason == "length":
            parts.append("cut at the token limit")
        return ", ".join(parts)


def stream(
    client: PacelineClient, messages: Messages, options: Options, answer: Answer
) -> Generator[Piece, None, None]:
    """The pieces of one answer, which is filled meanwhile. Raises what the ``openai`` package raises.

    Closing the iterator closes the connection, and with it the server ends the request.
    """
    body: dict[str, Any] = {"model": options.model, "messages": messages}
    if options.max_tokens is not None:
        body["max_tokens"] = options.max_tokens
    if options.temperature is not None:
        body["temperature"] = options.temperature
    pieces = Pieces()
    answer.started = time.perf_counter()
    with client.chat.completions.create(
        **body,
        stream=True,
        stream_options={"include_usage": True},
        logprobs=True,  # for the text of each token
        extra_headers=STEPS_HEADERS | request_headers(learn=options.learn),
        extra_body={"return_token_ids": True},
    ) as chunks:
        for chunk in chunks:
            yield from _take(chunk, pieces, answer)


def _take(chunk: ChatCompletionChunk, pieces: Pieces, answer: Answer) -> list[Piece]:
    if chunk.usage is not None:
        answer.tokens = chunk.usage.completion_tokens
        answer.usage = usage_of(chunk)
    if not chunk.choices:
        return []
    choice = chunk.choices[0]
    answer.finish_reason = choice.finish_reason or answer.finish_reason
    content = choice.logprobs.content if choice.logprobs is not None else None
    tokens = [entry.token for entry in content or []]
    steps = ((chunk.model_extra or {}).get("paceline") or {}).get("steps") or []
    thought = (choice.delta.model_extra or {}).get("reasoning")
    text = (thought or "") + (choice.delta.content or "")
    if tokens or text:
        answer.last_token = time.perf_counter()
        answer.tokens += len(tokens)
        if answer.first_token is None:
            answer.first_token, answer.first_tokens = answer.last_token, len(tokens)
    answer.steps += steps
    answer.text += choice.delta.content or ""
    return pieces.add(text, tokens, steps)
