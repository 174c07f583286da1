"""How many threads the model computes with on a CPU, changed between two steps.

Read against vLLM 0.32.0: ``CPUWorker.init_device`` puts a function that does nothing in the place of
``torch.set_num_threads``, so that nobody undoes its binding of threads to cores. Here they are not bound
(``executor``), and this module holds the real one: import it before the worker starts.
"""

from __future__ import annotations

import torch

_set_num_threads = torch.set_num_threads


def share(cores: int, allotted: int, spared: int) -> int:
    """Threads of a model that may use ``cores``, is allotted some of them, and is to leave others free.

    What it was not allotted is free already, so that with half of the cores it spares nothing more.
    """
    return max(1, min(allotted, cores - spared))


def compute_with(threads: int) -> int:
    """Use so many threads in what this thread computes from now on; returns how many it has then."""
    if torch.get_num_threads() != threads:
        _set_num_threads(threads)
    return torch.get_num_threads()
