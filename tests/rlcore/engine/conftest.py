"""vLLM's kernels as its worker process has them, without a worker."""

from __future__ import annotations

import pytest


@pytest.fixture(scope="session")
def kernels() -> None:
    from vllm.platforms import current_platform

    current_platform.import_kernels()
    current_platform.register_triton_kernel_overrides()
