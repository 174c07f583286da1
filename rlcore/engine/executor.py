"""The model in the engine core's own process, on a CPU with one memory node.

vLLM puts a CPU worker into a process of its own, even a single one, so that it can give it an OpenMP
environment, and keeps one core free for the others. Each step then crosses a process border three
times, and on two cores the model has one. Here the environment is set before the engine core starts
(see ``launch``), and all cores are the model's, or as many as it is told. While a learner on this machine
computes, one is the learner's (``threads``): threads that wait for each other lose more to a learner between
them than a core is worth (2 cores, 1 stream: 53 tokens/s and 320 positions trained a second on both, 62 and
710 on one each). A waiting thread sleeps after 5 ms. Read against vLLM 0.32.0:
``CpuPlatform.check_and_update_config`` replaces the executor named "uni", not a class.
"""

from __future__ import annotations

import os
from pathlib import Path

from vllm.v1.executor.uniproc_executor import UniProcExecutor

from rlcore.cores import computing


class InlineExecutor(UniProcExecutor):
    """vLLM's own for one worker, by another name."""


BOUND_ELSEWHERE = "VLLM_CPU_OMP_THREADS_BIND"


def fits(world_size: int) -> bool:
    """Whether the engine can run like this: one worker, one memory node, threads not bound by hand."""
    nodes = len(list(Path("/sys/devices/system/node").glob("node[0-9]*")))
    return world_size == 1 and nodes <= 1 and os.environ.get(BOUND_ELSEWHERE, "nobind") == "nobind"


def prepare(asked: int | None = None) -> int:
    """Set what OpenMP reads when the engine core starts; the user's own settings stay.

    ``asked``: cores that the model is to start with; they win over OMP_NUM_THREADS. Returns the cores that it
    may compute on, which are as many or more; 0 where the user has set the threads. OpenMP starts with all
    of them, whatever is asked, for what vLLM sizes by its threads must do for all that may come.
    """
    threads = "OMP_NUM_THREADS"
    given = asked is None and threads in os.environ
    cores = max(computing(), asked or 0)
    if asked is not None:
        os.environ[threads] = str(cores)
    for name, value in {
        BOUND_ELSEWHERE: "nobind",
        threads: str(cores),
        "KMP_BLOCKTIME": "5",
        "KMP_TPAUSE": "0",
    }.items():
        os.environ.setdefault(name, value)
    return 0 if given else cores
