"""Talk to a served model. What was drafted and accepted is shown in another colour than what the model
computed itself.

With PROMPT, or with a prompt on standard input, it is asked once and the answer alone goes to standard
output.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from collections.abc import Sequence

import msgspec
import openai

from clients.chat.answer import Options
from clients.chat.conversation import Conversation, reason
from clients.chat.screen import Screen
from clients.client import DEFAULT_URL, KEY_VARIABLE, PacelineClient

MAX_TOKENS = 1024


class ChatError(Exception):
    """Why there is no conversation."""


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="paceline chat", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    add = parser.add_argument
    add(
        "prompt", nargs="?", metavar="PROMPT", help="ask this, once ('-': what standard input says)"
    )
    add("--url", default=DEFAULT_URL, help=f"the server (default: {DEFAULT_URL})")
    add("--api-key", metavar="KEY", help=f"default: the environment's {KEY_VARIABLE}")
    add("--model", help="default: the first that the server names")
    add("--max-tokens", type=_positive, default=MAX_TOKENS, metavar="N",
        help=f"of an answer (default: {MAX_TOKENS})")  # fmt: skip
    add("--temperature", type=_temperature, metavar="T", help="default: the model's own")
    add("--system", default="", metavar="TEXT", help="what the model is told first")
    add("--no-learn", action="store_true", help="the drafter learns nothing of this conversation")
    return parser


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError("must be at least 1")
    return value


def _temperature(text: str) -> float:
    value = float(text)
    if not 0 <= value <= 2:
        raise argparse.ArgumentTypeError("must be between 0 and 2")
    return value


def main(argv: Sequence[str] | None = None) -> int:
    args = arguments().parse_args(argv)
    screen = Screen()
    try:
        prompt = _prompt(args.prompt)
        with PacelineClient(args.url, api_key=args.api_key) as client:
            options = Options(
                model=args.model or _first_model(client),
                max_tokens=args.max_tokens,
                temperature=args.temperature,
                learn=False if args.no_learn else None,
            )
            conversation = Conversation(client, options, screen, args.system)
            if prompt is None:
                with contextlib.suppress(ImportError):
                    import readline  # noqa: F401 - input() edits lines with it
                conversation.run()
            else:
                conversation.ask(prompt)
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # Whoever read the answer has enough; nothing may be written at exit either.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (ChatError, openai.OpenAIError, msgspec.ValidationError) as error:
        screen.error(reason(error, args.url))
        return 2
    return 0


def _prompt(given: str | None) -> str | None:
    """What to ask, once; None for a conversation."""
    if given == "-" or (given is None and not sys.stdin.isatty()):
        given = sys.stdin.read()
    if given is not None and not given.strip():
        raise ChatError("the prompt is empty")
    return given


def _first_model(client: PacelineClient) -> str:
    models = client.models.list().data
    if not models:
        raise ChatError("the server names no model; choose one with --model")
    return models[0].id
