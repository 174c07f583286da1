from __future__ import annotations

from importlib.metadata import EntryPoint

import pytest

from rlcore.environments import registry
from rlcore.environments.base import Environment
from rlcore.errors import UsageError
from tests.rlcore.environments.faulty import Faulty

FAULTY = "tests.rlcore.environments.faulty"


@pytest.mark.parametrize("name", registry.BUILT_IN)
def test_every_built_in_name_is_an_environment(name: str) -> None:
    assert issubclass(registry.find(f"{name}:something"), Environment)


def test_a_class_is_found_by_its_import_path_and_gets_its_options() -> None:
    made = registry.make(f"{FAULTY}:Faulty", {"tasks": 3})
    assert isinstance(made, Faulty)
    assert (made.size("train"), made.spec) == (3, f"{FAULTY}:Faulty")


def test_an_installed_package_adds_a_name(monkeypatch: pytest.MonkeyPatch) -> None:
    point = EntryPoint("faulty", f"{FAULTY}:Faulty", registry.ENTRY_POINTS)
    monkeypatch.setattr(registry, "entry_points", lambda group: [point])
    assert registry.find("faulty") is Faulty
    assert registry.find("faulty:argument") is Faulty
    assert "faulty" in registry.names()


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        ("nothing", "there are gymnasium, math_answers"),
        ("no_such_package.module:Class", "no module 'no_such_package'"),
        (f"{FAULTY}:Missing", "has no Missing"),
        ("pathlib:Path", "no subclass of Environment"),
        ("a b:c", "there are gymnasium, math_answers"),
    ],
)
def test_a_spec_that_names_nothing_is_told_what_there_is(spec: str, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        registry.make(spec, {})


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"maker": "x"}, "unexpected keyword argument 'maker'; its options: marker, tasks"),
        ({"tasks": "three"}, "option tasks: Expected `int`, got `str`"),
    ],
)
def test_options_that_do_not_fit_are_told(options: dict, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        registry.make(f"{FAULTY}:Faulty", options)


def test_a_missing_library_is_told_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "gymnasium", None)
    with pytest.raises(UsageError, match=r"paceline\[rl\]"):
        registry.make("gymnasium:Guessing-v0", {})
