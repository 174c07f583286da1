"""A load generator: real ``openai`` client, real streams, every chunk's arrival written down.

Nothing is retried, because a retry would hide what is measured. Every request ends within its
deadline, and whatever went wrong stands in its record.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable
from typing import Any
from urllib.parse import urlsplit

import msgspec
from openai import AsyncOpenAI, DefaultAsyncHttpxClient
from openai.types.chat import ChatCompletionChunk

from clients.workload import Prompt
from rlcore.records.acceptance import AcceptanceCount

VERSION_HEADER = "x-paceline-draft-version"
USAGE_HEADER = "x-paceline-usage"
TENANT_HEADER = "x-paceline-tenant"
LOOPBACK = frozenset({"127.0.0.1", "::1", "localhost"})


class LoadOptions(msgspec.Struct, frozen=True, kw_only=True):
    """How requests are made. ``model`` is the id the server gives its model."""

    model: str
    concurrency: int = 2
    max_tokens: int = 128
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int | None = None
    """The n-th request is sent with seed + n; None sends no seed."""
    deadline_s: float = 300.0
    """A request that has not ended by then is given up and recorded as failed."""
    multi_turn: bool = False
    """Ask a prompt's later turns too, with the answers so far."""
    token_ids: bool = True
    """Ask for each chunk's token ids (vLLM's ``return_token_ids``)."""
    ignore_eos: bool = False
    tenant: str | None = None
    """Whose requests these are, for the server (``x-paceline-tenant``)."""
    errors_in_a_row: int = 8
    """So many failed requests one after the other end the load: the server is gone."""


class RequestRecord(msgspec.Struct, kw_only=True):
    """One request as its client saw it. Times are seconds after the load's origin."""

    prompt_id: str
    turn: int = 0
    id: str | None = None
    """The response's id."""
    started: float
    first_token: float | None = None
    ended: float = 0.0
    chunk_times: list[float] = []
    """Arrival of every chunk that carried tokens."""
    token_ids: list[list[int]] = []
    """The tokens of those chunks; empty when they were not asked for."""
    prompt_tokens: int | None = None
    output_tokens: int | None = None
    admitted_version: int | None = None
    """Live draft version at admission, from the response header."""
    versions: list[AcceptanceCount] | None = None
    """``usage.paceline``: what each draft version did for this request."""
    finish_reason: str | None = None
    text: str = ""
    restarted: bool = False
    """The stream began anew: a second response id, or a second opening chunk after tokens."""
    error: str | None = None


class LoadResult(msgspec.Struct, kw_only=True):
    """``ended_by``: ``prompts`` (none left), ``time``, ``stop`` or ``errors``."""

    records: list[RequestRecord]
    """In the order in which the requests ended."""
    started: float
    ended: float
    ended_by: str


def make_client(base_url: str, api_key: str | None = None) -> AsyncOpenAI:
    """An OpenAI client without retries; ``base_url`` ends in ``/v1``."""
    local = urlsplit(base_url).hostname in LOOPBACK
    return AsyncOpenAI(
        base_url=base_url,
        api_key=api_key or "none",
        max_retries=0,
        http_client=DefaultAsyncHttpxClient(trust_env=not local),
    )


async def served_model(client: AsyncOpenAI) -> str:
    """The id of the model that the server serves."""
    models = await client.models.list()
    return models.data[0].id


async def run_load(
    client: AsyncOpenAI,
    prompts: Iterable[Prompt],
    options: LoadOptions,
    *,
    origin: float | None = None,
    until: float | None = None,
    stop: asyncio.Event | None = None,
    on_record: Callable[[RequestRecord], None] | None = None,
) -> LoadResult:
    """Send each prompt once, ``concurrency`` at a time.

    ``origin`` is the ``time.perf_counter()`` that all times count from (default: now). After
    ``until`` seconds, or once ``stop`` is set, no request is begun; those under way are waited for.
    """
    origin = time.perf_counter() if origin is None else origin
    queue = iter(prompts)
    records: list[RequestRecord] = []
    started = time.perf_counter() - origin
    sent = failing = 0
    reason: str | None = None

    def over() -> str | None:
        """Why no further request may begin, prompts aside."""
        if failing >= options.errors_in_a_row:
            return "errors"
        if stop is not None and stop.is_set():
            return "stop"
        if until is not None and time.perf_counter() - origin >= until:
            return "time"
        return None

    def draw() -> Prompt | None:
        nonlocal reason
        if reason is None:
            reason = over()
        prompt = next(queue, None) if reason is None else None
        if prompt is None and reason is None:
            reason = "prompts"
        return prompt

    async def work() -> None:
        nonlocal sent, failing
        while (prompt := draw()) is not None:
            answers: list[str] = []
            for _ in range(len(prompt.turns) if options.multi_turn else 1):
                number, sent = sent, sent + 1
                record = await send(
                    client, prompt, options, origin=origin, number=number, answers=answers
                )
                failing = failing + 1 if record.error else 0
                records.append(record)
                if on_record is not None:
                    on_record(record)
                if record.error or over():
                    break
                answers.append(record.text)

    async with asyncio.TaskGroup() as group:
        for _ in range(options.concurrency):
            group.create_task(work())
    now = time.perf_counter() - origin
    return LoadResult(records=records, started=started, ended=now, ended_by=reason or "prompts")


async def send(
    client: AsyncOpenAI,
    prompt: Prompt,
    options: LoadOptions,
    *,
    origin: float,
    number: int = 0,
    answers: list[str] | None = None,
) -> RequestRecord:
    """One streamed request; never raises for what the server does, the record says it."""
    answers = answers or []
    started = time.perf_counter() - origin
    record = RequestRecord(prompt_id=prompt.id, turn=len(answers), started=started)
    try:
        async with asyncio.timeout(options.deadline_s) as deadline:
            await _stream(client, prompt.messages(answers), options, number, origin, record)
    except Exception as error:  # whatever it was, it is this request's outcome
        late = isinstance(error, TimeoutError) and deadline.expired()
        what = f"not ended within {options.deadline_s:g} s" if late else str(error)
        record.error = f"{'deadline' if late else type(error).__name__}: {what}"
    record.ended = time.perf_counter() - origin
    return record


async def _stream(
    client: AsyncOpenAI,
    messages: list[dict[str, str]],
    options: LoadOptions,
    number: int,
    origin: float,
    record: RequestRecord,
) -> None:
    extra: dict[str, Any] = {}
    if options.token_ids:
        extra["return_token_ids"] = True
    if options.ignore_eos:
        extra["ignore_eos"] = True
    body: dict[str, Any] = {
        "model": options.model,
        "messages": messages,
        "max_tokens": options.max_tokens,
        "temperature": options.temperature,
        "top_p": options.top_p,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if options.seed is not None:
        body["seed"] = options.seed + number
    headers = {USAGE_HEADER: "true"}
    if options.tenant is not None:
        headers[TENANT_HEADER] = options.tenant
    response = await client.chat.completions.with_raw_response.create(
        **body,
        timeout=options.deadline_s + 5,  # the caller's deadline comes first
        extra_headers=headers,
        extra_body=extra,
    )
    version = response.headers.get(VERSION_HEADER)
    record.admitted_version = None if version is None else int(version)
    async with response.parse() as stream:
        async for chunk in stream:
            _note(record, chunk, time.perf_counter() - origin)
    if record.finish_reason is None:
        raise ConnectionError("the stream ended without a finish reason")
    if record.output_tokens is None:
        raise ConnectionError("the stream ended without its usage")


def _note(record: RequestRecord, chunk: ChatCompletionChunk, now: float) -> None:
    """Write one chunk into the record."""
    if record.id is None:
        record.id = chunk.id
    elif chunk.id != record.id:
        record.restarted = True
    for choice in chunk.choices:
        ids = (choice.model_extra or {}).get("token_ids")
        text = choice.delta.content
        opening = choice.delta.role is not None and not text and not ids
        if opening and record.chunk_times:
            record.restarted = True
        if not opening and (ids or (ids is None and text is not None)):
            record.chunk_times.append(now)
            if record.first_token is None:
                record.first_token = now
            if ids is not None:
                record.token_ids.append(list(ids))
        record.text += text or ""
        record.finish_reason = choice.finish_reason or record.finish_reason
    if chunk.usage is not None:
        record.prompt_tokens = chunk.usage.prompt_tokens
        record.output_tokens = chunk.usage.completion_tokens
        ours = (chunk.usage.model_extra or {}).get("paceline")
        if ours is not None:
            record.versions = msgspec.convert(ours["versions"], list[AcceptanceCount])
