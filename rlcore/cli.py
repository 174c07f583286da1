"""The ``paceline`` command. Subcommands are entry points; the root imports none of them itself."""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib.metadata import entry_points, version

from rlcore.errors import PacelineError

GROUP = "paceline.commands"

SUMMARIES = {
    "serve": "serve a model, with its drafter learning from the traffic",
    "learn": "run a learner on its own, for a server in another process",
    "record": "keep a server's traces in a file, to learn from them again",
    "models": "list, make and verify models and drafts in the home folder",
    "keys": "make a tenant's key, or a pair of keys for a link to another machine",
    "config": "print the settings a command would run with",
    "rl-train": "train a policy with reinforcement learning on the engine that serves it",
    "rl-eval": "measure a policy folder, or a running server, on held-out tasks",
    "chat": "talk to a served model, and see which tokens were drafted",
    "top": "watch a server's drafter at work",
    "bench": "compare servers on the same requests: no speculation, frozen and learning drafters",
}
"""Said without importing the commands, some of which take seconds to import."""


def main(argv: list[str] | None = None) -> int:
    words = sys.argv[1:] if argv is None else argv
    commands = {point.name: point for point in entry_points(group=GROUP)}
    if not words or words[0] in ("-h", "--help"):
        print(_help(sorted(commands)))
        return 0
    if words[0] == "--version":
        print(f"paceline {version('paceline')}")
        return 0
    if words[0] not in commands:
        return fail(f"unknown command {words[0]!r}; there are: {', '.join(sorted(commands))}")
    return guarded(lambda argv: commands[words[0]].load()(argv), words[1:])


def guarded(command: Callable[[list[str]], int], argv: list[str]) -> int:
    """The exit code of a command; errors that a user can do something about are one line."""
    try:
        return int(command(argv))
    except PacelineError as error:
        return fail(str(error))
    except KeyboardInterrupt:
        return 130


def fail(message: str) -> int:
    """Say what is wrong; the exit code for it."""
    print(f"paceline: {message}", file=sys.stderr)
    return 2


def _help(names: list[str]) -> str:
    width = max((len(name) for name in names), default=0)
    lines = [f"  {name:<{width}}  {SUMMARIES.get(name, '')}".rstrip() for name in names]
    return "\n".join(
        [
            "usage: paceline COMMAND [flags]",
            "",
            *lines,
            "",
            "paceline COMMAND --help lists its flags",
        ]
    )


if __name__ == "__main__":
    sys.exit(main())
