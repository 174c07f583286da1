"""Prompts that the target writes, and its answers to them, from one server.

Prompts are sampled from the target (see ``leads``) and not learned from; its answers to them are
ordinary traffic, with traces. Answers are greedy or sampled, in shares like those of users.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Awaitable
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO, TypeVar

import httpx
from openai import AsyncOpenAI, OpenAIError

from clients.selfplay.leads import draw_lead
from clients.selfplay.template import ChatTemplate, SelfPlayError, UserTurn
from clients.workload import Prompt

Answer = TypeVar("Answer")

PROMPT_TEMPERATURE = 0.85
"""Below 1 in place of top-p, which sorts the whole vocabulary on a CPU."""

PASSAGE = "Write a news report about {topic}. Write only the report."
NO_LEARNING = {"x-paceline-learn": "false"}
TEMPERATURES = ((0.0, 0.6), (0.7, 0.25), (1.0, 0.15))
FOLLOW_UPS = 0.15
"""Share of conversations with a second turn."""

SHORTEST = 12
"""Characters; what is shorter is no prompt."""

LONGEST_ANSWER = (128, 128, 256)
GIVE_UP_AFTER = 20
"""Failed requests in a row."""

REQUEST_DEADLINE = 600.0
"""Seconds. Large targets on a CPU are slow, and a request waits for all that run beside it."""

STALLED_AFTER = 900.0
"""Seconds without an answer's tokens, whatever the reason: a server that fails now and then, or a
target that writes nothing but prompts it has written before."""


@dataclass(frozen=True)
class Share:
    """What one server is to answer."""

    url: str
    """The OpenAI base URL, ending in /v1."""
    tokens: int
    seed: int
    prompts: Path
    """The file that the prompts are written to; must not exist."""


class Traffic:
    """Writes prompts and asks them until enough answer tokens have been served."""

    def __init__(
        self,
        client: AsyncOpenAI,
        model: str,
        template: ChatTemplate,
        share: Share,
        taken: set[str],
        out: TextIO,
    ) -> None:
        """``taken``: keys of prompts that are not sent; those that are sent are added."""
        self._client = client
        self._model = model
        self._template = template
        self._share = share
        self._random = random.Random(share.seed)
        self._taken = taken
        self._out = out
        self._last_answer = time.monotonic()
        self.tokens = 0
        self.prompts = 0
        self.repeats = 0
        self.failed = 0

    async def run(self, concurrency: int) -> None:
        """Raises SelfPlayError when the server, or the target, does not get on."""
        first = await self._in_time(self._template.user_turn())
        self._last_answer = time.monotonic()
        workers = [asyncio.create_task(self._work(first)) for _ in range(concurrency)]
        try:
            await asyncio.gather(*workers)
        finally:
            for worker in workers:
                worker.cancel()
            await asyncio.gather(*workers, return_exceptions=True)

    async def _work(self, first: UserTurn) -> None:
        failing = 0
        reason = "it writes no new prompts"
        while self.tokens < self._share.tokens:
            if time.monotonic() - self._last_answer > STALLED_AFTER:
                raise SelfPlayError(
                    f"no answer from {self._share.url} in {STALLED_AFTER:.0f} s "
                    f"({self.repeats} repeats, {self.failed} failed): {reason}"
                )
            try:
                await self._conversation(first)
                failing = 0
            except (OpenAIError, httpx.HTTPError, TimeoutError) as error:
                self.failed += 1
                failing += 1
                reason = str(error) or f"nothing within {REQUEST_DEADLINE:.0f} s"
                if failing >= GIVE_UP_AFTER:
                    raise SelfPlayError(
                        f"{self._share.url} fails again and again: {reason}"
                    ) from None
                await asyncio.sleep(1)

    async def _in_time(self, request: Awaitable[Answer]) -> Answer:
        async with asyncio.timeout(REQUEST_DEADLINE):
            return await request

    async def _conversation(self, first: UserTurn) -> None:
        kind, lead = draw_lead(self._random)
        if kind in ("summary", "grounded"):
            passage = await self._answer(
                [{"role": "user", "content": PASSAGE.format(topic=lead)}], 0.8, 220, learn=False
            )
            if kind == "summary":
                prompt = f"Summarize: {passage}"
            else:
                question = await self._continue(first, f"{passage}\n\nQuestion: ", 40)
                prompt = f"{passage}\n\nQuestion: {question}"
        else:
            prompt = lead + await self._continue(first, lead, 160)
        answers: list[str] = []
        messages = [{"role": "user", "content": prompt}]
        if not self._note(kind, prompt):
            return
        while True:
            answers.append(await self._ask(messages))
            if len(answers) == 2 or self._random.random() >= FOLLOW_UPS:
                return
            messages.append({"role": "assistant", "content": answers[-1]})
            turn = await self._in_time(self._template.user_turn(messages))
            follow = await self._continue(turn, "", 80)
            if len(follow) < SHORTEST:
                return
            messages.append({"role": "user", "content": follow})

    def _note(self, kind: str, prompt: str) -> bool:
        """Write the prompt down; False when it is too short, or was sent before."""
        noted = Prompt(id=f"self-{self._share.seed}-{self.prompts}", turns=(prompt,), source=kind)
        if len(prompt) < SHORTEST or noted.key in self._taken:
            self.repeats += 1
            return False
        self._taken.add(noted.key)
        self.prompts += 1
        line = {"id": noted.id, "source": kind, "turns": [prompt]}
        self._out.write(json.dumps(line, ensure_ascii=False) + "\n")
        self._out.flush()
        return True

    async def _continue(self, turn: UserTurn, lead: str, max_tokens: int) -> str:
        """The user's turn that begins with ``lead``, without it."""
        response = await self._in_time(
            self._client.completions.create(
                model=self._model,
                prompt=turn.opening + lead,
                temperature=PROMPT_TEMPERATURE,
                max_tokens=max_tokens,
                stop=[turn.end] if turn.end else None,
                extra_headers=NO_LEARNING,
                # The end of a turn need not be an end-of-sequence token; then only its text stops it.
                extra_body={"add_special_tokens": False, "skip_special_tokens": False},
            )
        )
        return response.choices[0].text.rstrip()

    async def _ask(self, messages: list[dict[str, str]]) -> str:
        values, weights = zip(*TEMPERATURES, strict=True)
        temperature = self._random.choices(values, weights)[0]
        return await self._answer(messages, temperature, self._random.choice(LONGEST_ANSWER))

    async def _answer(
        self,
        messages: list[dict[str, str]],
        temperature: float,
        max_tokens: int,
        *,
        learn: bool = True,
    ) -> str:
        response = await self._in_time(
            self._client.chat.completions.create(
                model=self._model,
                messages=messages,  # type: ignore[arg-type]
                temperature=temperature,
                max_tokens=max_tokens,
                extra_headers={} if learn else NO_LEARNING,
            )
        )
        if learn and response.usage is not None and response.usage.completion_tokens:
            self.tokens += response.usage.completion_tokens
            self._last_answer = time.monotonic()
        return (response.choices[0].message.content or "").strip()
