"""The TOML file of a run: a preset by name, or a file of the user's."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path

from pydantic import BaseModel

from rlcore.errors import UsageError

PRESETS = files("rlcore.rl") / "presets"


def presets() -> list[str]:
    return sorted(
        p.name.removesuffix(".toml") for p in PRESETS.iterdir() if p.name.endswith(".toml")
    )


def with_file(argv: list[str]) -> list[str]:
    """The preset or file in front as ``--config``; raises UsageError when there is no such one."""
    if not argv or argv[0].startswith("-"):
        if any(word in ("-h", "--help") or word.startswith("--config") for word in argv):
            return argv
        raise UsageError(f"give a preset ({', '.join(presets())}) or a TOML file first")
    name = argv[0]
    if name in presets():
        return ["--config", str(PRESETS / f"{name}.toml"), *argv[1:]]
    if Path(name).is_file():
        return ["--config", name, *argv[1:]]
    raise UsageError(f"there is no preset or file {name!r}; presets: {', '.join(presets())}")


def flags_of(settings: type[BaseModel], prefix: str = "") -> set[str]:
    """All its flags, those of sections with a dot; without the dashes in front."""
    flags = set()
    for name, field in settings.model_fields.items():
        flag = prefix + name.replace("_", "-")
        section = field.annotation
        if isinstance(section, type) and issubclass(section, BaseModel):
            flags |= flags_of(section, f"{flag}.")
        else:
            flags |= {flag, f"{prefix}no-{name.replace('_', '-')}"} if section is bool else {flag}
    return flags


def given_flags(argv: list[str]) -> list[str]:
    """The flags among these words, without dashes and values."""
    own = argv[: argv.index("--")] if "--" in argv else argv
    return [w.removeprefix("--").partition("=")[0] for w in own if w.startswith("--")]
