"""Drive a server with prompts that its own target writes: ``python -m clients.selfplay.generate``.

Every prompt goes to a file, so that it can be compared with a benchmark's.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

import httpx
from openai import OpenAIError

from clients.load import LOOPBACK, make_client, served_model
from clients.selfplay.template import ChatTemplate, SelfPlayError
from clients.selfplay.traffic import REQUEST_DEADLINE, Share, Traffic
from clients.workload import WorkloadError, read_workload

SHOWN_EVERY = 20.0
"""Seconds."""


async def generate(share: Share, concurrency: int, taken: set[str]) -> Traffic:
    """Raises SelfPlayError. Several may run in one loop and share ``taken``: no prompt is sent twice."""
    root = httpx.URL(share.url.rstrip("/").removesuffix("/v1"))
    http = httpx.AsyncClient(
        base_url=root, timeout=REQUEST_DEADLINE, trust_env=root.host not in LOOPBACK
    )
    try:
        share.prompts.touch(exist_ok=False)
    except OSError as error:
        raise SelfPlayError(f"{share.prompts}: {error.strerror}") from None
    with open(share.prompts, "a", encoding="utf-8") as out:
        async with make_client(share.url) as client, http:
            try:
                model = await served_model(client)
                traffic = Traffic(client, model, ChatTemplate(http), share, taken, out)
                shown = asyncio.create_task(_show(traffic, share))
                try:
                    await traffic.run(concurrency)
                finally:
                    shown.cancel()
            except (OpenAIError, httpx.HTTPError, TimeoutError) as error:
                raise SelfPlayError(f"{share.url} does not answer: {error}") from None
    return traffic


async def _show(traffic: Traffic, share: Share) -> None:
    """Says every now and then how far it is, until cancelled."""
    started = time.monotonic()
    while True:
        await asyncio.sleep(SHOWN_EVERY)
        rate = traffic.tokens / (time.monotonic() - started)
        print(
            f"{share.prompts.name}: {traffic.tokens} tokens, {traffic.prompts} prompts, "
            f"{rate:.0f} tokens/s, {traffic.repeats} repeats, {traffic.failed} failed",
            flush=True,
        )


def keys_of(files: Iterable[Path]) -> set[str]:
    """Of the prompts in workload files; raises SelfPlayError."""
    try:
        return {prompt.key for path in files for prompt in read_workload(path)}
    except WorkloadError as error:
        raise SelfPlayError(str(error)) from None


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
    share = Share(args.url, args.tokens, args.seed, args.prompts)
    try:
        traffic = asyncio.run(generate(share, args.concurrency, keys_of(args.avoid)))
    except SelfPlayError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"{traffic.tokens} tokens over {traffic.prompts} prompts, {traffic.failed} failed")
    return 0


if __name__ == "__main__":
    sys.exit(main())
