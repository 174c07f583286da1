from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from rlcore.environments import sandbox
from rlcore.environments.python_code import PythonCode, program_in
from rlcore.errors import UsageError

ROWS = [
    {
        "text": f"Write double{i}.",
        "test_list": [f"assert double{i}(2) == 4", f"assert double{i}(0) == zero"],
        "test_setup_code": "zero = 0",
    }
    for i in range(20)
]


@pytest.fixture
def file(tmp_path: Path) -> str:
    path = tmp_path / "mbpp.jsonl"
    path.write_bytes(b"\n".join(msgspec.json.encode(row) for row in ROWS))
    return str(path)


def test_the_last_block_is_the_program() -> None:
    reply = "First\n```python\na = 1\n```\nor rather\n```\na = 2\n```\nso."
    assert program_in(reply) == "a = 2\n"
    assert program_in("```py\na = 3") == "a = 3"  # cut off by the length limit
    for none in ("", "a = 1", "```python\n```"):
        assert program_in(none) is None


@pytest.mark.slow
def test_replies_are_scored_by_their_tests(file: str) -> None:
    if sandbox.problem_with(strong=True) is not None:
        pytest.skip("no strong sandbox here")
    quick: dict[str, float] = {"cpu_s": 1, "wall_s": 20.0}
    env = PythonCode("python_code", file=file, limits=quick)
    shares = PythonCode("python_code", file=file, limits=quick, partial=True)
    task = env.task("train", 0)
    name = task.data["question"].split()[1].rstrip(".")
    for body, reward, share, parts in [
        ("return 2 * x", 1.0, 1.0, {"tests": 1.0}),
        ("return 4", 0.0, 0.5, {"tests": 0.5, "tests_failed": 1.0}),
        ("while True: pass", 0.0, 0.0, None),
    ]:
        for scored, expected in ((env, reward), (shares, share)):
            scored.reset(task)
            scored.step(f"```python\ndef {name}(x):\n {body}\n```")
            score = scored.score()
            assert score.reward == expected
            assert score.correct == (reward == 1.0)
            assert parts is None or score.parts == parts
            assert parts is not None or score.parts.keys() & {"cpu", "timeout"}
    env.reset(task)
    env.step("")
    assert env.score().parts == {"tests": 0.0, "no_code": 1.0}


@pytest.mark.slow
def test_limits_that_do_not_exist_are_refused(file: str) -> None:
    with pytest.raises(UsageError, match=r"limits: .*cpus"):
        PythonCode("python_code", file=file, limits={"cpus": 2})
