"""``paceline top`` as a process, behind it the server's real feed route on recorded data."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from clients.process import free_port
from rlcore.feed import Sample
from tests.clients.paceline_app import KEY, PacelineApp
from tests.clients.recorded import TARGET
from tests.clients.stub import running
from tests.clients.terminal import COMMAND, DEADLINE, Terminal

ENTERED, LEFT, CURSOR = "\x1b[?1049h", "\x1b[?1049l", "\x1b[?25h"


@pytest.fixture
def server(tmp_path: Path) -> Iterator[PacelineApp]:
    with running(PacelineApp(tmp_path)) as app:
        yield app


def arguments(server: PacelineApp, *more: str) -> list[str]:
    return ["top", "--url", server.url, "--api-key", KEY, *more]


def plain(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*COMMAND, *words], capture_output=True, text=True, timeout=DEADLINE, check=False,
        stdin=subprocess.DEVNULL,
    )  # fmt: skip


@pytest.mark.parametrize("key", ["q", "\x03"])
def test_it_is_live_and_leaves_the_terminal_as_it_was(server, key):
    with Terminal(*arguments(server)) as terminal:
        place = terminal.wait_for("without drafts")
        assert ENTERED in terminal.raw
        assert TARGET in terminal.text
        terminal.wait_for("without drafts", place)
        terminal.wait_for("team-a", place)
        terminal.send(key)
        assert terminal.wait_end() == 0
        assert terminal.raw.index(ENTERED) < terminal.raw.index(LEFT)
        assert terminal.raw.rindex(CURSOR) > terminal.raw.rindex("\x1b[?25l")
        assert terminal.settings == terminal.before


def test_it_follows_the_terminals_size(server):
    with Terminal(*arguments(server), columns=100) as terminal:
        place = terminal.wait_for(r"tokens/s without drafts \(estimate\)")
        terminal.resize(40, 12)
        place = terminal.wait_for("undrafted", place)
        terminal.resize(100, 40)
        terminal.wait_for(r"tokens/s without drafts \(estimate\)", place)
        terminal.send("q")
        assert terminal.wait_end() == 0


def test_no_color_is_honoured(server):
    with Terminal(*arguments(server), NO_COLOR="1") as terminal:
        terminal.wait_for("without drafts")
        terminal.send("q")
        assert terminal.wait_end() == 0
        assert "\x1b[3" not in terminal.raw.replace("\x1b[3J", "")
        assert ";3" not in terminal.raw


def test_a_server_that_goes_is_said_and_found_again(tmp_path):
    app = PacelineApp(tmp_path)
    with Terminal("top", "--url", "http://127.0.0.1:1", "--api-key", KEY) as terminal:
        terminal.wait_for("no connection: no server answers at http://127.0.0.1:1")
        terminal.send("q")
        assert terminal.wait_end() == 0
    with running(app), Terminal(*arguments(app)) as terminal:
        place = terminal.wait_for("without drafts")
        app.feed.refuses = True
        place = terminal.wait_for("no connection: .*trying again", place)
        terminal.wait_for("without drafts", place)
        app.feed.refuses = False
        terminal.wait_for(TARGET, place)
        terminal.send("q")
        assert terminal.wait_end() == 0


def test_a_wrong_key_ends_it_with_one_line(server):
    with Terminal("top", "--url", server.url, "--api-key", "wrong") as terminal:
        assert terminal.wait_end() == 2
        after = terminal.raw[terminal.raw.rindex(LEFT) :]
        assert "paceline: Missing, wrong or expired API key" in after
        assert terminal.settings == terminal.before


def test_once_prints_one_frame(server):
    done = plain(*arguments(server, "--once"))
    assert done.returncode == 0
    assert "speed-up" in done.stdout
    assert "team-a" in done.stdout
    assert "\x1b" not in done.stdout
    assert all(len(line) <= 80 for line in done.stdout.splitlines())


def test_json_prints_samples(server):
    done = plain(*arguments(server, "--json", "--once"))
    assert done.returncode == 0
    (line,) = done.stdout.splitlines()
    assert msgspec.json.decode(line, type=Sample).tenants
    process = subprocess.Popen(
        [*COMMAND, *arguments(server, "--json")], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert process.stdout is not None
    times = [msgspec.json.decode(process.stdout.readline(), type=Sample).time for _ in range(3)]
    assert times == sorted(set(times))
    process.stdout.close()  # as `head` does
    assert process.communicate(timeout=DEADLINE)[1] == b""
    assert process.returncode == 0


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--once", "--url", f"http://127.0.0.1:{free_port()}"], "paceline: no server answers at"),
        ([], "paceline: this is no terminal; give --once or --json"),
    ],
)
def test_what_goes_wrong_is_one_line_and_an_exit_code(words, said):
    done = plain("top", *words)
    assert done.returncode == 2
    assert done.stderr.startswith(said)
    assert done.stderr.count("\n") == 1
