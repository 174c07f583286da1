"""Drive a server with prompts that its own target writes: ``python -m clients.selfplay.generate``.

Prompts are sampled from the target (see ``leads``) and not learned from; its answers to them are
ordinary traffic, with traces. Every prompt goes to a file, so that it can be compared with a
benchmark's. Answers are greedy or sampled, in shares like those of users.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TextIO

from openai import AsyncOpenAI, OpenAIError

from clients.load import make_client, served_model
from clients.selfplay.leads import draw_lead
from clients.workload import Prompt, read_workload

SYSTEM = (
    "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face"
    "<|im_end|>\n"
)
"""What the embedded model's chat template puts before the first turn."""

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


class Traffic:
    """Writes prompts and asks them until enough answer tokens have been served."""

    def __init__(
        self, client: AsyncOpenAI, model: str, tokens: int, seed: int, taken: set[str], out: TextIO
    ) -> None:
        self._client = client
        self._model = model
        self._wanted = tokens
        self._random = random.Random(seed)
        self._taken = taken
        self._out = out
        self.tokens = 0
        self.prompts = 0
        self.repeats = 0
        self.failed = 0

    async def run(self, concurrency: int) -> None:
        async with asyncio.TaskGroup() as group:
            for _ in range(concurrency):
                group.create_task(self._work())

    async def _work(self) -> None:
        failing = 0
        while self.tokens < self._wanted:
            try:
                await self._conversation()
                failing = 0
            except OpenAIError as error:
                self.failed += 1
                failing += 1
                if failing >= GIVE_UP_AFTER:
                    raise SystemExit(f"the server fails again and again: {error}") from None
                await asyncio.sleep(1)

    async def _conversation(self) -> None:
        kind, lead = draw_lead(self._random)
        if kind in ("summary", "grounded"):
            passage = await self._answer(
                [{"role": "user", "content": PASSAGE.format(topic=lead)}], 0.8, 220, learn=False
            )
            if kind == "summary":
                prompt = f"Summarize: {passage}"
            else:
                question = await self._continue(f"{passage}\n\nQuestion: ", 40)
                prompt = f"{passage}\n\nQuestion: {question}"
        else:
            prompt = lead + await self._continue(lead, 160)
        answers: list[str] = []
        messages = [{"role": "user", "content": prompt}]
        if not self._note(kind, prompt):
            return
        while True:
            answers.append(await self._ask(messages))
            if len(answers) == 2 or self._random.random() >= FOLLOW_UPS:
                return
            messages.append({"role": "assistant", "content": answers[-1]})
            before = "".join(
                f"<|im_start|>{m['role']}\n{m['content']}<|im_end|>\n" for m in messages
            )
            follow = await self._continue("", 80, before)
            if len(follow) < SHORTEST:
                return
            messages.append({"role": "user", "content": follow})

    def _note(self, kind: str, prompt: str) -> bool:
        """Write the prompt down; False when it is too short, or was sent before."""
        noted = Prompt(id=f"self-{self.prompts}", turns=(prompt,), source=kind)
        if len(prompt) < SHORTEST or noted.key in self._taken:
            self.repeats += 1
            return False
        self._taken.add(noted.key)
        self.prompts += 1
        line = {"id": noted.id, "source": kind, "turns": [prompt]}
        self._out.write(json.dumps(line, ensure_ascii=False) + "\n")
        self._out.flush()
        return True

    async def _continue(self, lead: str, max_tokens: int, before: str = "") -> str:
        """The user's turn that begins with ``lead``, without it."""
        response = await self._client.completions.create(
            model=self._model,
            prompt=f"{SYSTEM}{before}<|im_start|>user\n{lead}",
            temperature=PROMPT_TEMPERATURE,
            max_tokens=max_tokens,
            stop=["<|im_end|>"],
            extra_headers=NO_LEARNING,
            extra_body={"add_special_tokens": False},
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
        response = await self._client.chat.completions.create(
            model=self._model,
            messages=messages,  # type: ignore[arg-type]
            temperature=temperature,
            max_tokens=max_tokens,
            extra_headers={} if learn else NO_LEARNING,
        )
        if learn and response.usage is not None:
            self.tokens += response.usage.completion_tokens
        return (response.choices[0].message.content or "").strip()


async def generate(args: argparse.Namespace, taken: set[str], out: TextIO) -> Traffic:
    async with make_client(args.url) as client:
        traffic = Traffic(client, await served_model(client), args.tokens, args.seed, taken, out)
        started = time.monotonic()

        async def progress() -> None:
            while True:
                await asyncio.sleep(20)
                rate = traffic.tokens / (time.monotonic() - started)
                print(
                    f"{traffic.tokens} tokens, {traffic.prompts} prompts, {rate:.0f} tokens/s, "
                    f"{traffic.repeats} repeats, {traffic.failed} failed",
                    flush=True,
                )

        shown = asyncio.create_task(progress())
        try:
            await traffic.run(args.concurrency)
        finally:
            shown.cancel()
    return traffic


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m clients.selfplay.generate", description=__doc__
    )
    parser.add_argument("--url", required=True, help="the server's OpenAI base URL, ending in /v1")
    parser.add_argument("--tokens", type=int, required=True, help="answer tokens to be served")
    parser.add_argument("--prompts", type=Path, required=True, metavar="FILE.jsonl")
    parser.add_argument(
        "--avoid", type=Path, nargs="*", default=[], metavar="FILE.jsonl", help="prompts never sent"
    )
    parser.add_argument("--concurrency", type=int, default=32)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    taken = {prompt.key for path in args.avoid for prompt in read_workload(path)}
    with open(args.prompts, "x", encoding="utf-8") as out:
        traffic = asyncio.run(generate(args, taken, out))
    print(f"{traffic.tokens} tokens over {traffic.prompts} prompts, {traffic.failed} failed")
    return 0


if __name__ == "__main__":
    sys.exit(main())
