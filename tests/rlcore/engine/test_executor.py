"""The model runs in the engine core's process where that is safe; what the user set stays."""

from __future__ import annotations

import inspect
import os

import pytest
from vllm.platforms.cpu import CpuPlatform
from vllm.v1.executor.abstract import Executor

from rlcore.engine import executor


@pytest.fixture(autouse=True)
def clean(monkeypatch):
    for name in (executor.BOUND_ELSEWHERE, "OMP_NUM_THREADS", "KMP_BLOCKTIME", "KMP_TPAUSE"):
        monkeypatch.delenv(name, raising=False)


def test_several_workers_or_threads_bound_by_hand_are_left_to_vllm(monkeypatch):
    assert not executor.fits(2)
    monkeypatch.setenv(executor.BOUND_ELSEWHERE, "0-1")
    assert not executor.fits(1)


def test_threads_are_no_more_than_the_cores_this_process_may_use(monkeypatch):
    cores = executor.prepare()
    assert os.environ["OMP_NUM_THREADS"] == str(cores)
    assert 1 <= cores <= len(os.sched_getaffinity(0))
    assert os.environ[executor.BOUND_ELSEWHERE] == "nobind"


def test_what_the_user_set_stays_and_is_not_ours_to_change(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    assert executor.prepare() == 0
    assert os.environ["OMP_NUM_THREADS"] == "7"


@pytest.mark.parametrize(("physical", "usable", "cores"), [(None, 1, 1), (None, 8, 8), (4, 8, 4)])
def test_threads_are_as_many_as_cores_that_can_be_used(monkeypatch, physical, usable, cores):
    monkeypatch.setattr(executor.psutil, "cpu_count", lambda logical: physical)
    monkeypatch.setattr(executor.os, "sched_getaffinity", lambda pid: set(range(usable)))
    assert executor.prepare() == cores


def test_vllm_takes_the_executor_for_what_it_is():
    assert issubclass(executor.InlineExecutor, Executor)
    # By this word alone a CPU's executor is exchanged for one with a process of its own.
    source = inspect.getsource(CpuPlatform.check_and_update_config)
    assert 'distributed_executor_backend == "uni"' in source
