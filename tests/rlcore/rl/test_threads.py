"""How cores are shared at the start, and where they can move at all."""

from __future__ import annotations

import pytest

from rlcore.rl.engine import server_flags
from rlcore.rl.threads import CoreSplit, engine_cores, split_cores
from tests.rlcore.rl.made import make_settings


@pytest.fixture(autouse=True)
def four_cores_with_hyperthreads(monkeypatch):
    monkeypatch.setattr("rlcore.rl.threads.usable", lambda: 8)
    monkeypatch.setattr("rlcore.rl.threads.computing", lambda: 4)
    monkeypatch.setattr("rlcore.rl.threads.torch.cuda.is_available", lambda: False)


def split(tmp_path, threads=None, device="auto", **engine) -> CoreSplit:
    optimiser = {"device": device, "threads": threads}
    return split_cores(make_settings(tmp_path, optimiser=optimiser, engine=engine))


def test_half_each_unless_told_otherwise(tmp_path):
    assert split(tmp_path) == CoreSplit(4, 4, True)
    assert split(tmp_path, threads=3) == CoreSplit(5, 3, True)
    assert split(tmp_path, threads=8) == CoreSplit(1, 8, True)


def test_over_subscription_is_kept_but_no_engine_takes_more_than_there_is(tmp_path):
    settings = make_settings(
        tmp_path, optimiser={"device": "cpu", "threads": 2}, engine={"threads": 8}
    )
    assert split_cores(settings) == CoreSplit(8, 2, True)
    assert (engine_cores(9), engine_cores(8), engine_cores(None)) == (8, 8, None)


def test_an_engine_is_not_given_hyperthreads_that_it_did_not_begin_with():
    assert CoreSplit(2, 6, True).most_engine == 4
    assert CoreSplit(5, 3, True).most_engine == 5
    assert CoreSplit(2, 6, True).most_trainer == 7


def test_cores_move_only_on_a_cpu_with_an_engine_of_the_runs_own(tmp_path, monkeypatch):
    assert split(tmp_path, where="process").shared
    assert not split(tmp_path, url="http://127.0.0.1:1").shared
    assert not split(tmp_path, device="cuda").shared
    monkeypatch.setattr("rlcore.rl.threads.torch.cuda.is_available", lambda: True)
    assert not split(tmp_path).shared
    assert not split(tmp_path, device="cpu").shared, "the engine takes the GPU"


def test_the_engine_starts_with_its_share(tmp_path):
    settings = make_settings(tmp_path)
    flags = server_flags(settings, tmp_path, tmp_path, cores=3)
    assert flags[flags.index("--cores") + 1] == "3"
    assert flags.index("--cores") < flags.index("--")
    assert "--cores" not in server_flags(settings, tmp_path, tmp_path)
