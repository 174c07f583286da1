"""``paceline config [serve|learn] [flags]``: print the settings a command would run with, as TOML."""

from __future__ import annotations

import json
from typing import Any

from pydantic import BaseModel, SecretStr

from rlcore.errors import UsageError
from rlcore.settings import CommonSettings, LearnSettings, ServeSettings, load

COMMANDS: dict[str, type[CommonSettings]] = {"serve": ServeSettings, "learn": LearnSettings}


def main(argv: list[str]) -> int:
    if argv[:1] in (["-h"], ["--help"]):
        print("usage: paceline config [serve|learn] [the command's flags]\n\n" + (__doc__ or ""))
        return 0
    name = "serve"
    if argv and not argv[0].startswith("-"):
        name, argv = argv[0], argv[1:]
    if name not in COMMANDS:
        raise UsageError(f"config of {name!r}? There are: {', '.join(COMMANDS)}")
    print(to_toml(load(COMMANDS[name], argv)))
    return 0


def to_toml(settings: BaseModel) -> str:
    """Effective values; what is unset stands in a comment, secrets are masked."""
    lines: list[str] = []
    tables: list[str] = []
    for name, value in settings:
        if isinstance(value, BaseModel):
            tables += ["", f"[{name}]", to_toml(value)]
        elif value is None:
            lines.append(f"# {name} is not set")
        else:
            lines.append(f"{name} = {_value(value)}")
    return "\n".join([*lines, *tables])


def _value(value: Any) -> str:
    if isinstance(value, SecretStr):
        return '"**********"'
    if isinstance(value, bool | int | float | list):
        return json.dumps(value)
    return json.dumps(str(value))
