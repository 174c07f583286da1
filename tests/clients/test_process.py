"""ServerProcess with a small real process in the server's place."""

from __future__ import annotations

import signal
import sys
import time
from pathlib import Path

import psutil
import pytest
import zmq

from clients.bench.drain import DrainProcess
from clients.process import ServerFailed, ServerProcess, console_script, free_port

SERVER = """
import argparse, http.server, os, signal, subprocess, sys, time
parser = argparse.ArgumentParser()
for name, kind in (("--home", str), ("--port", int), ("--how", str)):
    parser.add_argument(name, type=kind)
args = parser.parse_args()
print("starting with", os.environ["PACELINE_HOME"])
if args.how == "fail":
    print("the model is missing"); sys.exit(2)
if args.how == "sleep":
    time.sleep(60)
if args.how in ("stubborn", "child"):
    sleep = [sys.executable, "-c", "import time; time.sleep(600)"]
    child = subprocess.Popen(sleep, start_new_session=True)
    print("child", child.pid)
if args.how == "stubborn":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200 if self.path == "/ready" else 404); self.end_headers()
    def log_message(self, *args): pass
http.server.HTTPServer(("127.0.0.1", args.port), Handler).serve_forever()
"""


@pytest.fixture
def command(tmp_path: Path) -> list[str]:
    script = tmp_path / "server.py"
    script.write_text(SERVER)
    return [sys.executable, str(script)]


def test_it_serves_and_is_gone_after_the_block(tmp_path: Path, command: list[str]) -> None:
    with ServerProcess(tmp_path / "home", command=command) as server:
        assert server.alive
        assert server.get("/ready").status_code == 200
        assert server.start_seconds is not None
        assert server.cpu_seconds() > 0
        pid = server.pid
    assert not server.alive
    assert not psutil.pid_exists(pid)
    assert f"starting with {tmp_path / 'home'}" in server.tail()
    assert server.log == tmp_path / "home.log"


def test_a_server_that_ends_shows_its_log(tmp_path: Path, command: list[str]) -> None:
    server = ServerProcess(tmp_path / "home", ["--how", "fail"], command=command)
    with pytest.raises(ServerFailed, match=r"(?s)exit code 2.*the model is missing") as failure:
        server.start()
    assert failure.value.returncode == 2
    assert not server.alive


def test_a_server_that_never_answers_is_ended_at_the_deadline(
    tmp_path: Path, command: list[str]
) -> None:
    server = ServerProcess(
        tmp_path / "home", ["--how", "sleep"], command=command, start_deadline_s=1.0
    )
    with pytest.raises(ServerFailed, match=r"(?s)not ready on /ready within 1 s.*starting with"):
        server.start()
    assert not server.alive


def test_sigterm_ends_it_and_leaves_no_child_of_another_group(
    tmp_path: Path, command: list[str]
) -> None:
    server = ServerProcess(tmp_path / "home", ["--how", "child"], command=command).start()
    (child,) = server.children()
    assert server.stop() == -signal.SIGTERM
    assert not child.is_running()
    assert server.stop() is None


def test_who_ignores_sigterm_is_killed_with_its_children(
    tmp_path: Path, command: list[str]
) -> None:
    server = ServerProcess(
        tmp_path / "home", ["--how", "stubborn"], command=command, stop_deadline_s=0.5
    )
    server.start()
    (child,) = server.children()
    begun = time.monotonic()
    assert server.stop() == -signal.SIGKILL
    assert time.monotonic() - begun < 10
    assert not child.is_running()


def test_it_can_be_killed_and_started_again(tmp_path: Path, command: list[str]) -> None:
    server = ServerProcess(tmp_path / "home", command=command).start()
    first = server.pid
    server.kill()
    assert not server.alive
    with server:
        assert server.pid != first
    assert server.tail().count("starting with") == 2


def test_free_ports_can_be_bound_and_the_script_is_beside_python(
    tmp_path: Path, monkeypatch
) -> None:
    assert 1024 <= free_port() <= 65535
    fake = tmp_path / "python"
    monkeypatch.setattr(sys, "executable", str(fake))
    with pytest.raises(FileNotFoundError, match="install the project"):
        console_script()
    (tmp_path / "paceline").touch()
    assert console_script() == tmp_path / "paceline"


def test_the_drain_counts_what_it_throws_away(tmp_path: Path) -> None:
    with zmq.Context() as context, context.socket(zmq.PUSH) as push:
        with DrainProcess(tmp_path) as drain:
            push.setsockopt(zmq.LINGER, 5000)
            push.connect(f"{drain.base}.traces")
            for _ in range(3):
                push.send_multipart([b"head", b"x" * 100])
            push.close()
            time.sleep(1.0)
        assert drain.counts == {"messages": 3, "bytes": 312}
