"""Is vLLM's compiled mode right on this machine, and faster? Three servers, the same prompts.

Plain vLLM in float32, eager, is what the others are compared with: log-probabilities of the prompts' tokens,
and greedy answers. Then eager and compiled, plain vLLM or Paceline without a learner, serve the same requests
in turns.
"""

from __future__ import annotations

import asyncio
import tempfile
from argparse import Namespace
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import msgspec
import numpy as np
from openai import AsyncOpenAI

from clients.bench import common
from clients.bench.modes import target_folder
from clients.bench.plain_vllm import VllmServer
from clients.load import LoadOptions, make_client, run_load, served_model
from clients.process import ServerProcess
from clients.workload import Prompt

REFERENCE, EAGER, COMPILED = "float32 eager", "bfloat16 eager", "bfloat16 compiled"
CONCURRENCY = (1, 8)
FLAGS = ["--max-model-len", "1024", "--kv-cache-memory-bytes", str(2**29), "--max-num-seqs", "16"]


def servers_of(args: Namespace, home: Path, target: Path) -> dict[str, ServerProcess]:
    """By their names, none started."""

    def plain(name: str, *flags: str) -> ServerProcess:
        return VllmServer(home / name, target, [*flags, *FLAGS], start_deadline_s=deadline)

    def ours(name: str, *flags: str) -> ServerProcess:
        given = ["--target", str(target), "--dtype", "bfloat16", "--learner", "off", *flags]
        return ServerProcess(home / name, [*given, "--", *FLAGS], start_deadline_s=deadline)

    deadline = args.start_deadline
    reference = plain("reference", "--dtype", "float32", "--enforce-eager")
    if args.paceline:
        eager, compiled = ours("eager"), ours("compiled", "--no-enforce-eager")
    else:
        eager = plain("eager", "--dtype", "bfloat16", "--enforce-eager")
        compiled = plain("compiled", "--dtype", "bfloat16")
    return {REFERENCE: reference, EAGER: eager, COMPILED: compiled}


class Answer(msgspec.Struct):
    """To one prompt: log-probabilities of its tokens but the first, and the greedy continuation."""

    logprobs: list[float]
    text: str


class Distance(msgspec.Struct, kw_only=True):
    """Of a server's log-probabilities (nats) and answers from the reference's."""

    tokens: int
    mean: float
    p99: float
    max: float
    same_answers: int
    answers: int


def distance(reference: Sequence[Answer], answers: Sequence[Answer]) -> Distance:
    """Both in the prompts' order."""
    errors = np.concatenate(
        [
            np.abs(np.subtract(ours.logprobs, theirs.logprobs))
            for ours, theirs in zip(answers, reference, strict=True)
        ]
    )
    return Distance(
        tokens=errors.size,
        mean=float(errors.mean()),
        p99=float(np.percentile(errors, 99)),
        max=float(errors.max()),
        same_answers=sum(a.text == b.text for a, b in zip(answers, reference, strict=True)),
        answers=len(answers),
    )


async def ask(client: AsyncOpenAI, model: str, prompt: Prompt, max_tokens: int) -> Answer:
    response = await client.completions.create(
        model=model,
        prompt=prompt.turns[0],
        max_tokens=max_tokens,
        temperature=0.0,
        extra_body={"prompt_logprobs": 0},
    )
    (choice,) = response.choices
    extra = choice.model_extra or {}
    each = [next(iter(entry.values()))["logprob"] for entry in extra["prompt_logprobs"] if entry]
    return Answer(each, choice.text)


async def answers_of(
    server: ServerProcess, prompts: Sequence[Prompt], max_tokens: int
) -> list[Answer]:
    async with make_client(server.openai_url) as client:
        model = await served_model(client)
        return [await ask(client, model, prompt, max_tokens) for prompt in prompts]


async def speed(
    server: ServerProcess, prompts: Sequence[Prompt], concurrency: int, max_tokens: int
) -> float:
    """Tokens a second."""
    async with make_client(server.openai_url) as client:
        options = LoadOptions(
            model=await served_model(client),
            concurrency=concurrency,
            max_tokens=max_tokens,
            ignore_eos=True,
        )
        result = await run_load(client, prompts, options)
    failed = [record.error for record in result.records if record.error]
    if failed:
        raise common.BenchError(f"a request failed: {failed[0]}")
    return sum(r.output_tokens or 0 for r in result.records) / (result.ended - result.started)


def ratios(
    servers: dict[str, ServerProcess], prompts: Sequence[Prompt], rounds: int, max_tokens: int
) -> dict[int, list[tuple[float, float]]]:
    """Concurrency -> (eager, compiled) tokens/s of each round, which begins with either in turns."""
    found: dict[int, list[tuple[float, float]]] = {}
    for concurrency in CONCURRENCY:
        block = prompts[: 2 * concurrency + 2]
        for name in (EAGER, COMPILED):
            asyncio.run(speed(servers[name], block[:2], 1, 16))
        for turn in range(rounds):
            names = (EAGER, COMPILED) if turn % 2 == 0 else (COMPILED, EAGER)
            each = {
                n: asyncio.run(speed(servers[n], block, concurrency, max_tokens)) for n in names
            }
            found.setdefault(concurrency, []).append((each[EAGER], each[COMPILED]))
    return found


def main() -> int:
    parser = common.make_parser("compiled", __doc__, max_tokens=64)
    parser.add_argument("--prompts", type=int, default=48, help="compared (default: 48)")
    parser.add_argument(
        "--paceline", action="store_true", help="with its drafter, in place of plain vLLM"
    )
    parser.add_argument("--rounds", type=int, default=4, help="of the speed's pairs (default: 4)")
    args = common.parse(parser)
    chosen = common.prompts_of(args)
    prompts, _ = common.take(chosen.prompts, args.prompts, "the comparison")
    machine = common.machine_facts()
    home = Path(tempfile.mkdtemp(prefix="paceline-compiled-"))
    target = target_folder(args.target, home / "target")
    servers = servers_of(args, home, target)
    with ExitStack() as stack:
        for name, server in servers.items():
            stack.enter_context(server)
            common.console.print(f"{name} serves after {server.start_seconds:.0f} s")
        answers = {
            name: asyncio.run(answers_of(server, prompts, args.max_tokens))
            for name, server in servers.items()
        }
        servers[REFERENCE].stop()
        pairs = ratios(servers, prompts, args.rounds, args.max_tokens)
    distances = {name: distance(answers[REFERENCE], answers[name]) for name in (EAGER, COMPILED)}
    for name, found in distances.items():
        common.console.print(
            f"{name}: {found.mean:.4f} nats from float32 (99 %: {found.p99:.3f}, at most {found.max:.3f}, "
            f"{found.tokens} tokens), {found.same_answers} of {found.answers} answers the same"
        )
    for concurrency, each in pairs.items():
        gains = sorted(compiled / eager for eager, compiled in each)
        eager, compiled = np.median(each, axis=0)
        common.console.print(
            f"concurrency {concurrency}: eager {eager:.1f} tokens/s, compiled {compiled:.1f}, "
            f"ratio {np.median(gains):.2f} ({gains[0]:.2f} - {gains[-1]:.2f})"
        )
    details = {
        "start_s": {name: server.start_seconds for name, server in servers.items()},
        "distances": distances,
        "tokens_per_second": {str(c): each for c, each in pairs.items()},
    }
    common.write_json(args.json, common.report("compiled", machine, args, chosen) | details)
    return 0


if __name__ == "__main__":
    common.run_main(main)
