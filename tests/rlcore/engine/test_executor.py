"""The model runs in the engine core's process where that is safe; what the user set stays."""

from __future__ import annotations

import inspect
import os

import pytest
from hypothesis import given
from hypothesis import strategies as st
from vllm.platforms.cpu import CpuPlatform
from vllm.v1.executor.abstract import Executor

import rlcore.cores
from rlcore.engine import executor, threads


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


def a_machine(monkeypatch, physical: int | None, usable: int) -> None:
    monkeypatch.setattr(rlcore.cores.psutil, "cpu_count", lambda logical: physical)
    monkeypatch.setattr(rlcore.cores.os, "sched_getaffinity", lambda pid: set(range(usable)))


def test_what_the_user_set_stays_and_is_not_ours_to_change(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    assert executor.prepare() == 0
    assert os.environ["OMP_NUM_THREADS"] == "7"


@pytest.mark.parametrize(("physical", "usable", "cores"), [(None, 1, 1), (None, 8, 8), (4, 8, 4)])
def test_threads_are_as_many_as_cores_that_can_be_used(monkeypatch, physical, usable, cores):
    a_machine(monkeypatch, physical, usable)
    assert executor.prepare() == cores


@pytest.mark.parametrize(("asked", "most"), [(1, 4), (4, 4), (6, 6)])
def test_cores_that_are_asked_for_win_over_the_environment_and_leave_room_for_more(
    monkeypatch, asked, most
):
    """More than the physical ones are hyperthreads, which were asked for."""
    a_machine(monkeypatch, physical=4, usable=8)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert executor.prepare(asked) == most
    assert os.environ["OMP_NUM_THREADS"] == str(most)


@given(st.integers(1, 64), st.integers(1, 64), st.integers(0, 64))
def test_what_was_not_allotted_counts_as_spared_and_a_thread_is_always_left(
    cores, allotted, spared
):
    found = threads.share(cores, allotted, spared)
    assert 1 <= found <= max(1, allotted)
    assert found + spared <= cores or found == 1
    if allotted + spared <= cores:
        assert found == allotted


def test_vllm_takes_the_executor_for_what_it_is():
    assert issubclass(executor.InlineExecutor, Executor)
    # By this word alone a CPU's executor is exchanged for one with a process of its own.
    source = inspect.getsource(CpuPlatform.check_and_update_config)
    assert 'distributed_executor_backend == "uni"' in source
