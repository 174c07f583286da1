"""Each token gets what its own adapter adds, and one without an adapter gets nothing (vLLM gives it the
last one's)."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from vllm.lora.layers import LoRAMapping
from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU

from rlcore.engine import adapter_product
from rlcore.engine.fixes import EngineUnsafe

UPSTREAM = PunicaWrapperCPU.add_lora_linear


@pytest.fixture(autouse=True)
def as_it_was():
    yield
    PunicaWrapperCPU.add_lora_linear = UPSTREAM


@given(st.lists(st.sampled_from([0, 7, 8, 9]), min_size=1, max_size=12), st.integers(0, 2**16))
def test_fused_layers_add_each_tokens_own_adapter(numbers, seed):
    generator = torch.Generator().manual_seed(seed)
    slots, rank, inputs, widths = [9, 7, 8], 2, 5, (4, 3)
    a = tuple(torch.randn(3, 1, rank, inputs, generator=generator) for _ in widths)
    b = tuple(torch.randn(3, 1, width, rank, generator=generator) for width in widths)
    x = torch.randn(len(numbers), inputs, generator=generator)
    y = torch.randn(len(numbers), sum(widths), generator=generator)
    want = y.clone()
    for i, number in enumerate(numbers):
        if number:
            slot = slots.index(number)
            added = [
                2.0 * bs[slot, 0] @ (as_[slot, 0] @ x[i]) for as_, bs in zip(a, b, strict=True)
            ]
            want[i] += torch.cat(added)
    adapter_product.apply()
    wrapper = PunicaWrapperCPU(16, 16, "cpu")
    mapping = LoRAMapping(tuple(numbers), tuple(numbers), is_prefill=True)
    wrapper.update_metadata(mapping, slots, len(slots) + 1, 32)
    wrapper.add_lora_linear(y, x, a, b, 2.0, widths)
    torch.testing.assert_close(y, want, atol=1e-5, rtol=1e-5)


def test_the_check_sees_what_vllm_does_without_the_repair():
    with pytest.raises(EngineUnsafe, match="LoRA adapters on a CPU"):
        adapter_product.verify()
    adapter_product.apply()
