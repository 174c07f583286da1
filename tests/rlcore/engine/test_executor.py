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
    executor.prepare(spared=0)
    assert 1 <= int(os.environ["OMP_NUM_THREADS"]) <= len(os.sched_getaffinity(0))
    assert os.environ[executor.BOUND_ELSEWHERE] == "nobind"


def test_what_the_user_set_stays(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    executor.prepare(spared=1)
    assert os.environ["OMP_NUM_THREADS"] == "7"


@pytest.mark.parametrize(
    ("cores", "spared", "threads"), [(1, 0, 1), (1, 1, 1), (2, 1, 1), (8, 1, 7)]
)
def test_a_core_is_left_to_the_learner_where_there_are_several(monkeypatch, cores, spared, threads):
    monkeypatch.setattr(executor.psutil, "cpu_count", lambda logical: None)
    monkeypatch.setattr(executor.os, "sched_getaffinity", lambda pid: set(range(cores)))
    executor.prepare(spared)
    assert os.environ["OMP_NUM_THREADS"] == str(threads)


def test_vllm_takes_the_executor_for_what_it_is():
    assert issubclass(executor.InlineExecutor, Executor)
    # By this word alone a CPU's executor is exchanged for one with a process of its own.
    source = inspect.getsource(CpuPlatform.check_and_update_config)
    assert 'distributed_executor_backend == "uni"' in source
