"""Repairs to vLLM that serving correctly depends on. Read against vLLM 0.32.0.

On CPUs without Triton, ``rejection_sampler.expand_batch_to_tokens`` hands its output to a C++ kernel
as an int64 *copy* whenever the dtype differs, so the float temperatures, top-p and int32 top-k it
returns are uninitialised memory (upstream issue 55005). Sampled speculation is then wrong in any
batch that is not all greedy.

vLLM plugins fail open (they can be filtered out, and their load errors are swallowed), so the worker
module applies the repair itself and refuses to start when the self-check fails.
"""

from __future__ import annotations

import torch
from vllm.v1.sample import rejection_sampler


class EngineUnsafe(RuntimeError):
    """The engine would sample from a wrong distribution; it must not start."""


def expand_batch_to_tokens(
    x: torch.Tensor,
    cu_num_tokens: torch.Tensor,
    num_tokens: int,
    replace_from: int = 0,
    replace_to: int = 0,
) -> torch.Tensor:
    """Repeat each request's value once per token of that request.

    ``x`` [batch] and ``cu_num_tokens`` [batch] (cumulative counts) give [num_tokens] in x's dtype;
    values equal to ``replace_from`` become ``replace_to``.
    """
    counts = torch.diff(cu_num_tokens, prepend=cu_num_tokens.new_zeros(1))
    values = torch.where(x == replace_from, torch.full_like(x, replace_to), x)
    return torch.repeat_interleave(values, counts.to(torch.int64), output_size=num_tokens)


def apply_fixes() -> None:
    """Idempotent."""
    from vllm.triton_utils import HAS_TRITON

    if not HAS_TRITON:
        rejection_sampler.expand_batch_to_tokens = expand_batch_to_tokens


def verify_fixes() -> None:
    """Compare the function the sampler will call with values known by hand; raises EngineUnsafe."""
    counts = torch.tensor([2, 2, 3, 5], dtype=torch.int32)
    for dtype in (torch.float32, torch.int32, torch.int64):
        x = torch.tensor([3, 4, 0, 7], dtype=dtype)
        got = rejection_sampler.expand_batch_to_tokens(x, counts, 5, replace_from=0, replace_to=1)
        if got.dtype != dtype or got.tolist() != [3, 3, 1, 7, 7]:
            raise EngineUnsafe(
                "vLLM's expand_batch_to_tokens returns wrong values "
                f"({got.tolist()} for dtype {dtype}), so sampled speculation would change the output "
                "distribution. Use the vLLM version pinned in requirements/."
            )
