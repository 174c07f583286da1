"""Which precision the trainer's matrix products run in. The learner trains on the CPU."""

from __future__ import annotations

import torch


def bfloat16_is_fast() -> bool:
    """Whether this machine multiplies bfloat16 matrices in hardware."""
    capabilities = torch.cpu.get_capabilities()
    return bool(capabilities.get("avx512_bf16") or capabilities.get("amx_bf16"))


def mixed_precision() -> torch.autocast:
    """A context for forward passes: bfloat16 where it is fast, else nothing.

    Weights, gradients and the optimizer stay in float32 either way.
    """
    return torch.autocast("cpu", torch.bfloat16, enabled=bfloat16_is_fast())
