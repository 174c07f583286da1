"""Watch a server's drafter at work: speed-up, acceptance, versions, learner, tenants."""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Sequence

import msgspec
from rich.console import Console

from clients.client import DEFAULT_URL, KEY_VARIABLE, PacelineAPIError, PacelineClient
from clients.top.reader import FeedReader
from clients.top.screen import joined, watch
from clients.top.state import SPAN_S, TopState
from rlcore.feed import Sample


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="paceline top", description=__doc__)
    add = parser.add_argument
    add("--url", default=DEFAULT_URL, help=f"the server (default: {DEFAULT_URL})")
    add("--api-key", metavar="KEY", help=f"default: the environment's {KEY_VARIABLE}")
    add("--once", action="store_true", help="print one frame (with --json: one sample) and end")
    add("--json", action="store_true", help="print samples as JSON lines")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    args = arguments().parse_args(argv)
    # Terminated, it still has a terminal to put back.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        with PacelineClient(args.url, api_key=args.api_key) as client:
            if args.once or args.json:
                return _print(client, args.url, once=args.once, as_json=args.json)
            return _watch(client, args.url)
    except PacelineAPIError as error:
        print(f"paceline: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 0 if not (args.once or args.json) else 130
    except BrokenPipeError:
        # Whoever read it has enough; nothing may be written at exit either.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def _print(client: PacelineClient, url: str, *, once: bool, as_json: bool) -> int:
    """Samples, or a frame, as they come; with ``once`` the first live one only."""
    state = TopState(url)
    for event in client.paceline.feed(0 if as_json else SPAN_S):
        state.take(event)
        if not isinstance(event, Sample):
            continue
        if as_json:
            sys.stdout.buffer.write(msgspec.json.encode(event) + b"\n")
            sys.stdout.buffer.flush()
        else:
            console = Console(highlight=False)
            console.print(joined(state, console.size.width, None))
        if once:
            return 0
    raise PacelineAPIError(f"{url} ended the feed")


def _watch(client: PacelineClient, url: str) -> int:
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise PacelineAPIError("this is no terminal; give --once or --json")
    reader = FeedReader(client)
    reader.start()
    try:
        watch(Console(highlight=False), reader, TopState(url))
    finally:
        reader.stop()
    return 0
