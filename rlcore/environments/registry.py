"""Environments by name: built in, installed by other packages, or named by an import path.

A spec is ``name`` or ``name:argument``. An installed package adds names through the entry point group
``paceline.environments``; ``package.module:Class`` names any class directly. The class is called with
the spec and the options as keyword arguments.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Mapping
from importlib.metadata import entry_points
from typing import Any, get_type_hints

import msgspec

from rlcore.environments.base import Environment
from rlcore.errors import UsageError

ENTRY_POINTS = "paceline.environments"

BUILT_IN = {
    "reasoning_gym": "rlcore.environments.reasoning_gym_tasks:ReasoningGym",
    "math_answers": "rlcore.environments.math_answers:MathAnswers",
    "python_code": "rlcore.environments.python_code:PythonCode",
    "tools": "rlcore.environments.tools:Tools",
    "gymnasium": "rlcore.environments.gymnasium_text:GymnasiumText",
    "verifiers": "rlcore.environments.verifiers_adapter:Verifiers",
}
"""Name -> import path; imported only when asked for."""


def names() -> list[str]:
    """Every name that can be asked for, sorted."""
    return sorted({*BUILT_IN, *(point.name for point in entry_points(group=ENTRY_POINTS))})


def make(spec: str, options: Mapping[str, Any]) -> Environment:
    """A new instance. Raises UsageError for a spec or options that cannot be used."""
    factory = find(spec)
    _check(spec, factory, options)
    try:
        return factory(spec, **options)
    except ModuleNotFoundError as error:
        raise UsageError(
            f"environment {spec!r} needs the module {error.name!r}; the libraries of the built-in ones "
            "come with pip install 'paceline[rl]'"
        ) from None


def find(spec: str) -> type[Environment]:
    """The class that a spec names. Raises UsageError where there is none."""
    name, _, argument = spec.partition(":")
    if name in BUILT_IN:
        return _load(spec, BUILT_IN[name])
    for point in entry_points(group=ENTRY_POINTS):
        if point.name == name:
            return _load(spec, point.value)
    if argument.isidentifier() and all(part.isidentifier() for part in name.split(".")):
        return _load(spec, spec)
    raise UsageError(
        f"there is no environment {spec!r}; there are {', '.join(names())}, and any class named "
        "by package.module:Class"
    )


def _load(spec: str, path: str) -> type[Environment]:
    module, _, attribute = path.partition(":")
    try:
        found = vars(importlib.import_module(module))[attribute]
    except ModuleNotFoundError as error:
        raise UsageError(
            f"environment {spec!r}: there is no module {error.name!r}; environments by name are "
            f"{', '.join(names())}"
        ) from None
    except KeyError:
        raise UsageError(f"environment {spec!r}: {module} has no {attribute}") from None
    if not (inspect.isclass(found) and issubclass(found, Environment)):
        raise UsageError(f"environment {spec!r}: {path} is no subclass of Environment")
    return found


def _check(spec: str, factory: type[Environment], options: Mapping[str, Any]) -> None:
    """Raises UsageError for an option that the class does not take, or of another type than it says."""
    try:
        inspect.signature(factory).bind(spec, **options)
    except TypeError as error:
        known = list(inspect.signature(factory).parameters)[1:]
        raise UsageError(
            f"environment {spec!r}: {error}; its options: {', '.join(known) or 'none'}"
        ) from None
    hints = get_type_hints(factory.__init__)
    for name, value in options.items():
        try:
            msgspec.convert(value, hints.get(name, Any))
        except msgspec.ValidationError as error:
            raise UsageError(f"environment {spec!r}: option {name}: {error}") from None
