"""The model's threads can be changed between two steps."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow


def test_a_change_of_threads_holds(embedded_model, tmp_path):
    if len(os.sched_getaffinity(0)) < 2:
        pytest.skip("one core: there is nothing to change")
    out = tmp_path / "rounds.json"
    environment = {
        **os.environ,
        "LD_PRELOAD": str(Path(sys.prefix) / "lib" / "libiomp5.so"),
        "OMP_NUM_THREADS": "2",
        "KMP_BLOCKTIME": "0",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_USE_V2_MODEL_RUNNER": "0",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_LOGGING_LEVEL": "ERROR",
    }
    command = [sys.executable, "-m", "tests.e2e.thread_change", str(embedded_model), str(out)]
    subprocess.run(command, env=environment, check=True, timeout=600)
    for one in json.loads(out.read_text())["rounds"]:
        first, second = one["seconds"]
        if one["threads"] == 1:
            assert second < 0.05 * first, one
        else:
            assert second > 0.15 * first, one  # the first thread has Python's part as well
