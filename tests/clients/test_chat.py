"""``paceline chat`` as a process: on a pseudo-terminal and without one."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from clients.process import free_port
from tests.clients.paceline_app import KEY, PacelineApp
from tests.clients.stub import running
from tests.clients.terminal import COMMAND, DEADLINE, Terminal

GREEN = "\x1b[32m"


@pytest.fixture
def server(tmp_path: Path) -> Iterator[PacelineApp]:
    with running(PacelineApp(tmp_path)) as app:
        yield app


def arguments(server: PacelineApp, *more: str) -> list[str]:
    return ["chat", "--url", server.url, "--api-key", KEY, *more]


def plain(server: PacelineApp, *more: str, given: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*COMMAND, *arguments(server, *more)],
        input=given, capture_output=True, text=True, timeout=DEADLINE, check=False,
    )  # fmt: skip


@pytest.mark.parametrize("merged", [1, 3])
def test_accepted_drafts_have_another_colour_however_chunks_are_merged(server, merged):
    server.merged = merged
    with Terminal(*arguments(server)) as terminal:
        terminal.wait_for("> ")
        terminal.send("hi\r")
        end = terminal.wait_for(r"\[7 tokens, 4 of them drafts")
        terminal.wait_for(r"acceptance length 3\.00, draft 0\]", end - 30)
        drafted = re.findall(re.escape(GREEN) + "(.*?)\x1b\\[0m", terminal.raw, re.DOTALL)
        assert "".join(drafted).endswith(", world And you")
        assert server.text in terminal.text
        terminal.send("/quit\r")
        assert terminal.wait_end() == 0


def test_no_color_is_honoured(server):
    with Terminal(*arguments(server, "hi"), NO_COLOR="1") as terminal:
        assert terminal.wait_end() == 0
        assert server.text in terminal.text
        assert not re.search(r"\x1b\[[0-9;]*3[0-9]m", terminal.raw)


def test_ctrl_c_stops_the_answer_and_not_the_program(server):
    server.answer, server.pause = [["word "]] * 1000, 0.05
    with Terminal(*arguments(server)) as terminal:
        terminal.wait_for("> ")
        terminal.send("go on\r")
        terminal.wait_for("word word")
        terminal.send("\x03")
        end = terminal.wait_for(r"\[stopped\]\s+> ")
        assert server.left.wait(DEADLINE)
        server.answer, server.pause = [["Yes."]], 0.0
        terminal.send("still there?\r")
        terminal.wait_for(r"Yes\.", end)
        *_, said, asked = server.bodies[-1]["messages"]
        assert said["content"].startswith("word word")
        assert asked["content"] == "still there?"
        terminal.wait_for(r"draft 0\]\s+> |tokens.*\]\s+> ", end)
        terminal.send("\x03")
        terminal.wait_for("Ctrl-D leaves", end)
        terminal.send("\x04")
        assert terminal.wait_end() == 0


def test_turns_and_commands(server):
    with Terminal(*arguments(server, "--system", "Be brief.", "--no-learn")) as terminal:
        place = terminal.wait_for("> ")
        for line in ("one", "/system Be long.", "two", "/reset", "three", "/nonsense", "/system"):
            terminal.send(f"{line}\r")
            place = terminal.wait_for(r"(\]|long\.|forgotten|lists them)\s+> ", place)
        terminal.send("/quit\r")
        assert terminal.wait_end() == 0
    first, second, third = [
        [(m["role"], m["content"]) for m in body["messages"]] for body in server.bodies
    ]
    assert first == [("system", "Be brief."), ("user", "one")]
    turns = [("user", "one"), ("assistant", server.text), ("user", "two")]
    assert second == [("system", "Be long."), *turns]
    assert third == [("system", "Be long."), ("user", "three")]
    assert all(headers["x-paceline-learn"] == "false" for headers in server.headers)


def test_an_error_is_one_line_and_the_conversation_goes_on_without_that_turn(server):
    with Terminal(*arguments(server)) as terminal:
        terminal.wait_for("> ")
        terminal.send("refuse\r")
        end = terminal.wait_for(r"paceline: the prompt is too long \(HTTP 400\)\s+> ")
        terminal.send("hi\r")
        terminal.wait_for(r"draft 0\]", end)
    assert len(server.bodies[-1]["messages"]) == 1


def test_a_model_cannot_write_control_sequences_to_a_terminal(server):
    server.answer = [["a\x1b[2Jb\x07\x9bc"]]
    with Terminal(*arguments(server, "hi")) as terminal:
        assert terminal.wait_end() == 0
        assert "a\N{REPLACEMENT CHARACTER}[2Jb" in terminal.raw
        assert "\x07" not in terminal.raw


@pytest.mark.parametrize("how", ["argument", "input", "dash"])
def test_without_a_terminal_the_answer_alone_goes_to_standard_output(server, how):
    more = {"argument": ["hi"], "input": [], "dash": ["-"]}[how]
    done = plain(server, *more, "--max-tokens", "9", "--temperature", "0", given="hi\n")
    assert done.returncode == 0
    assert done.stdout == f"{server.text}\n"
    assert re.fullmatch(r"\[7 tokens, 4 of them drafts.*draft 0\]\n", done.stderr)
    body = server.bodies[-1]
    assert body["messages"][0]["content"].strip() == "hi"
    assert (body["max_tokens"], body["temperature"], body["model"]) == (9, 0.0, "stub")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["refuse"], r"paceline: the prompt is too long \(HTTP 400\)"),
        (["hi", "--api-key", "wrong"], r"paceline: .*API key.* \(HTTP 401\)"),
        ([" "], "paceline: the prompt is empty"),
        (["hi", "--url", f"http://127.0.0.1:{free_port()}"], "paceline: no server answers at .*"),
    ],
)
def test_what_goes_wrong_is_one_line_and_an_exit_code(server, words, said):
    done = plain(server, *words)
    assert done.returncode == 2
    assert done.stdout == ""
    assert re.fullmatch(said + r"\n", done.stderr)
