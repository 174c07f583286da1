"""The example of docs/environments.md, as a user would try it."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path

import pytest

from rlcore.environments.host import EnvironmentHost

PAGE = Path(__file__).parents[3] / "docs" / "environments.md"


@pytest.mark.slow
def test_the_documented_environment_runs_from_the_working_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (example,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    (tmp_path / "reversal.py").write_text(example)
    (tmp_path / "rlcore").mkdir()  # a decoy
    (tmp_path / "rlcore" / "__init__.py").write_text("raise RuntimeError('the wrong one')")
    monkeypatch.chdir(tmp_path)

    async def run() -> None:
        async with EnvironmentHost("reversal:Reversal", {"letters": 3}) as host:
            task = await host.task("test", 7)
            number, messages = await host.reset(task)
            word = messages[0].content.split()[1]
            assert len(word) == 3
            assert (await host.step(number, f"It is {word[::-1]}.")).done
            score = await host.score(number)
            assert (score.reward, score.correct) == (1.0, True)

    asyncio.run(run())


def test_the_documented_specs_are_those_there_are() -> None:
    from rlcore.environments.registry import BUILT_IN

    named = set(re.findall(r"^\| `(\w+)", PAGE.read_text(), re.MULTILINE))
    assert named - {"package"} == set(BUILT_IN)
