"""The home folder: private, lockable, with sockets that fit."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from rlcore.errors import PacelineError
from rlcore.home import Home, HomeInUse, default_home

UNIX_SOCKET_PATH = 107


@pytest.fixture
def home(tmp_path: Path) -> Home:
    return Home(tmp_path / "home")


def test_folders_are_readable_by_their_owner_only(home: Home) -> None:
    folders = [home.models, home.drafts, home.learner, home.run, home.root]
    assert [folder.stat().st_mode & 0o777 for folder in folders] == [0o700] * len(folders)


def test_the_default_follows_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACELINE_HOME", "/somewhere")
    assert default_home() == Path("/somewhere")
    monkeypatch.setenv("PACELINE_HOME", "")
    monkeypatch.setenv("XDG_CACHE_HOME", "/caches")
    assert default_home() == Path("/caches/paceline")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert default_home() == Path.home() / ".cache" / "paceline"


def test_sockets_fit_below_a_long_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    deep = Path("/" + "long-name/" * 20)
    run = Home(deep).run
    assert run.parent == tmp_path
    assert run.stat().st_mode & 0o777 == 0o700
    assert run == Home(deep).run != Home(deep / "other").run


def test_a_short_homes_sockets_lie_inside(home: Home) -> None:
    if len(os.fsencode(home.root)) < 70:
        assert home.run == home.root / "run"
    assert len(os.fsencode(home.run / "learner.control")) < UNIX_SOCKET_PATH


def test_a_socket_folder_laid_by_another_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    home = Home(Path("/" + "long-name/" * 20))
    home.run.rmdir()
    mine = os.getuid()
    planted = tmp_path / f"paceline-{mine}-{_digest(home)}"
    planted.mkdir()
    if mine != 0:
        pytest.skip("only root can give a folder to another")
    os.chown(planted, 12345, -1)
    with pytest.raises(PacelineError, match="belongs to another user"):
        _ = home.run


def _digest(home: Home) -> str:
    return hashlib.sha256(os.fsencode(home.root.absolute())).hexdigest()[:16]


def test_a_second_process_is_told_who_holds_the_home(home: Home) -> None:
    script = (
        "import sys, pathlib; from rlcore.home import Home\n"
        "with Home(pathlib.Path(sys.argv[1])).lock('serve'): print('held', flush=True); input()"
    )
    command = [sys.executable, "-c", script, str(home.root)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        with (
            pytest.raises(HomeInUse, match=rf"in use by process {holder.pid} .*--home"),
            home.lock("serve"),
        ):
            pass
        with home.lock("models"):
            pass  # another name is another lock
        holder.kill()
    with home.lock("serve"):
        pass  # a killed holder leaves nothing behind


def test_a_lock_can_be_waited_for(home: Home) -> None:
    done = threading.Event()

    def second() -> None:
        with home.lock("models", wait=True):
            done.set()

    with home.lock("models"):
        thread = threading.Thread(target=second)
        thread.start()
        assert not done.wait(0.3)
    assert done.wait(10)
    thread.join()


def test_an_impossible_home_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(PacelineError, match=r"cannot use the folder .*--home"):
        _ = Home(tmp_path / "file").models
