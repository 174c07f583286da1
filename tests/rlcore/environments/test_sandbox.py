from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from rlcore.environments import sandbox
from rlcore.environments.sandbox import Limits, Outcome, Sandbox
from rlcore.errors import UsageError

pytestmark = pytest.mark.slow

QUICK = Limits(wall_s=30.0, cpu_s=1, memory_bytes=256 << 20)
"""Only what runs for ever meets its deadline, even on a busy machine."""

SHORT = Limits(wall_s=2.0, cpu_s=1, memory_bytes=256 << 20)
SYSTEM_PYTHON = Path("/usr/bin/python3")


@pytest.fixture(scope="module")
def strong() -> Sandbox:
    problem = sandbox.problem_with(strong=True)
    if problem is not None:
        pytest.skip(f"no strong sandbox here: {problem}")
    return Sandbox(QUICK)


@pytest.fixture
def weak(monkeypatch: pytest.MonkeyPatch) -> Sandbox:
    """With an interpreter that another user can run too, as root becomes one."""
    if not SYSTEM_PYTHON.exists():
        pytest.skip("no interpreter that every user can run")
    monkeypatch.setattr(sandbox, "_python", lambda: os.path.realpath(SYSTEM_PYTHON))
    real = sandbox.problem_with.__wrapped__
    monkeypatch.setattr(
        sandbox, "problem_with", lambda strong: "said the test" if strong else real(False)
    )
    return Sandbox(QUICK, allow_weak=True)


def left_running() -> list[psutil.Process]:
    """Descendants of this process."""
    return [p for p in psutil.Process().children(recursive=True) if p.status() != "zombie"]


def run(box: Sandbox, program: str, *tests: str) -> Outcome:
    before = set(left_running())
    start = time.monotonic()
    outcome = box.run(program, list(tests) or ["assert True"])
    assert time.monotonic() - start < QUICK.wall_s + 10
    assert set(left_running()) <= before
    assert not any(
        "escaped-from-the-sandbox" in " ".join(p.info["cmdline"] or [])
        for p in psutil.process_iter(["cmdline"])
    )
    return outcome


def test_tests_decide(strong: Sandbox) -> None:
    double = "def double(x):\n    return 2 * x"
    assert run(strong, double, "assert double(2) == 4", "assert double(0) == 0") == Outcome(
        "passed", 2
    )
    wrong = run(strong, "def double(x): return 4", "assert double(2) == 4", "assert double(0) == 0")
    assert wrong == Outcome("tests_failed", 1, "AssertionError")


@pytest.mark.parametrize(
    ("program", "reasons"),
    [
        ("import os\nwhile True: os.fork()", {"exception", "timeout", "exit"}),
        (
            "import os\nwhile True:\n try: os.fork()\n except OSError: pass",
            {"timeout", "cpu"},
        ),
        ("x = []\nwhile True: x.append(bytearray(10**7))", {"memory"}),
        ("import socket\nsocket.create_connection(('127.0.0.1', {port}), 2)", {"exception"}),
        ("import socket\nsocket.create_connection(('192.0.2.1', 80), 2)", {"exception"}),
        ("while True: pass", {"cpu", "timeout"}),
        ("import time\ntime.sleep(1000)", {"timeout"}),
        ("while True: print('x' * 10000)", {"output"}),
        ("open('{outside}', 'w').write('x')", {"exception"}),
        ("open('{outside}').read()", {"exception"}),
        ("for i in range(100): open(f'f{{i}}', 'wb').write(b'x' * 10**6)", {"exception"}),
        ("import os\nfor i in range(9999): open(f'f{{i}}', 'w').close()", {"exception"}),
        ("import os, signal\nos.kill(os.getpid(), signal.SIGSEGV)", {"exit"}),
        ("import sys\nsys.exit(0)", {"exit"}),
        ("import os\nos._exit(0)", {"exit"}),
        ("def broken(:", {"exception"}),
        ("", {"tests_failed"}),
    ],
)  # fmt: skip
def test_every_misdeed_is_a_failure_with_a_reason_and_leaves_nothing(
    strong: Sandbox, tmp_path: Path, program: str, reasons: set[str]
) -> None:
    outside = tmp_path / "outside"
    outside.write_text("untouched")
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(0.1)
        source = program.format(outside=outside, port=server.getsockname()[1])
        box = Sandbox(SHORT) if "timeout" in reasons else strong
        outcome = run(box, source, "assert missing()")
        with pytest.raises(TimeoutError):
            server.accept()
    assert outcome.reason in reasons
    assert outcome.passed == 0
    assert outside.read_text() == "untouched"


def test_what_a_program_leaves_behind_ends_with_it(strong: Sandbox) -> None:
    daemon = (
        "import os, sys\nif os.fork() == 0:\n os.setsid()\n"
        " os.execv(sys.executable, ['escaped-from-the-sandbox', '-c', 'import time; time.sleep(99)'])"
    )
    assert run(strong, daemon).reason == "passed"


RUNS_FOR_EVER = """
from rlcore.environments.sandbox import Limits, Sandbox

print("ready", flush=True)
Sandbox(Limits(wall_s=999.0)).run("import time; time.sleep(999)", [])
"""


def test_a_program_dies_with_the_process_that_runs_it(strong: Sandbox) -> None:
    runner = subprocess.Popen([sys.executable, "-c", RUNS_FOR_EVER], stdout=subprocess.PIPE)
    assert runner.stdout is not None
    assert runner.stdout.readline() == b"ready\n"
    deadline = time.monotonic() + 30
    while len(started := psutil.Process(runner.pid).children(recursive=True)) < 3:
        assert time.monotonic() < deadline, "launcher, first process and program have not come up"
        time.sleep(0.05)
    runner.kill()
    runner.wait(10)
    runner.stdout.close()
    _, alive = psutil.wait_procs(started, timeout=10)
    assert not alive


def test_a_program_sees_nothing_of_the_machine(strong: Sandbox) -> None:
    assert run(
        strong,
        "import os, signal, sys",
        "assert set(os.listdir('/')) <= {'dev', 'lib', 'lib64', 'usr', 'work', 'root', 'opt', 'home'}",
        "assert os.listdir('.') == []",
        "assert not os.path.exists('/proc')",
        "assert set(os.environ) <= {'LANG', 'LC_CTYPE', 'LD_LIBRARY_PATH'}",
        "assert os.getpid() == 2 and os.getuid() != 0",
        "os.kill(1, signal.SIGKILL)",  # which the kernel keeps from the first process
        "for path in ('/', '/lib', sys.base_prefix): assert os.statvfs(path).f_flag & os.ST_RDONLY",
        "open('mine', 'w').write('x')",
    ) == Outcome("passed", 8)


def test_a_program_gains_no_rights(strong: Sandbox) -> None:
    call = (
        "import ctypes\nlibc = ctypes.CDLL(None, use_errno=True)\n"
        "NEWUSER, NEWNS, RDONLY = 0x10000000, 0x20000, 1"
    )
    assert run(
        strong,
        call,
        "assert libc.unshare(NEWUSER) < 0",
        "assert libc.unshare(NEWNS) < 0",
        "assert libc.mount(b'tmpfs', b'/work', b'tmpfs', 0, None) < 0",
        "assert libc.chroot(b'.') < 0",
        "assert libc.setuid(0) < 0",
    ) == Outcome("passed", 5)


def test_a_printed_success_is_none(strong: Sandbox) -> None:
    forged = "import sys\nprint('0' * 32, 'test', 0, 'passed')\nsys.stdout.flush()"
    assert run(strong, forged, "assert False") == Outcome("tests_failed", 0, "AssertionError")


def test_without_namespaces_nothing_is_run_unless_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sandbox, "problem_with", lambda strong: "unshare: not permitted")
    with pytest.raises(UsageError, match=r"unshare: not permitted.*allow_weak_sandbox"):
        Sandbox(QUICK)
    with pytest.raises(UsageError, match="not even the weak sandbox"):
        Sandbox(QUICK, allow_weak=True)


def test_a_sandbox_that_cannot_be_built_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox, "_visible", lambda: ["/no/such/folder"])
    problem = sandbox.problem_with.__wrapped__(True)
    assert problem is not None
    assert "/no/such/folder" in problem


@pytest.mark.parametrize(
    ("program", "reasons"),
    [
        ("def double(x): return 2 * x", {"passed"}),
        ("import os\nwhile True: os.fork()", {"exception"}),
        ("x = []\nwhile True: x.append(bytearray(10**7))", {"memory"}),
        ("import socket\nsocket.socket()", {"exception"}),
        ("while True: pass", {"cpu", "timeout"}),
        ("while True: print('x' * 10000)", {"output"}),
        ("open('{outside}', 'w').write('x')", {"exception"}),
        ("open('inside', 'w').write('x')\ndef double(x): return 4", {"passed"}),
    ],
)
def test_the_weak_sandbox_holds_back_what_does_not_mean_to_break_out(
    weak: Sandbox, tmp_path: Path, program: str, reasons: set[str]
) -> None:
    box = Sandbox(SHORT, allow_weak=True) if "timeout" in reasons else weak
    outcome = run(box, program.format(outside=tmp_path / "outside"), "assert double(2) == 4")
    assert outcome.reason in reasons
    assert not (tmp_path / "outside").exists()
