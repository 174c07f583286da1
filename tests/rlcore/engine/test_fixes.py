"""The repaired ``expand_batch_to_tokens`` gives the right values, and a broken one stops the engine."""

from __future__ import annotations

import importlib.util

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from vllm.triton_utils import HAS_TRITON
from vllm.v1.sample import rejection_sampler

from rlcore.engine.fixes import EngineUnsafe, apply_fixes, expand_batch_to_tokens, verify_fixes

DTYPES = (
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int32, torch.int64,
)  # fmt: skip


@pytest.fixture
def shipped(kernels):
    """The function as vLLM ships it, from a fresh copy of its module."""
    spec = importlib.util.spec_from_file_location(
        rejection_sampler.__name__, rejection_sampler.__file__
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module._expand.kernel = rejection_sampler._expand.kernel
    return module.expand_batch_to_tokens


@pytest.fixture
def poisoned(monkeypatch):
    """Uninitialised memory that is never right by luck."""
    monkeypatch.setattr(
        torch.Tensor, "new_empty", lambda self, *size, **kw: self.new_full(size, 77)
    )


@settings(deadline=None)
@given(
    requests=st.lists(st.tuples(st.integers(0, 5), st.integers(0, 9)), min_size=1, max_size=12),
    dtype=st.sampled_from(DTYPES),
    count_dtype=st.sampled_from([torch.int32, torch.int64]),
    replace=st.one_of(st.just((0, 0)), st.tuples(st.integers(0, 9), st.integers(0, 9))),
)
def test_each_value_stands_once_for_every_token_of_its_request(
    requests, dtype, count_dtype, replace
):
    counts = [count for count, _ in requests]
    values = [value for _, value in requests]
    got = expand_batch_to_tokens(
        torch.tensor(values, dtype=dtype),
        torch.tensor(counts).cumsum(0).to(count_dtype),
        sum(counts),
        *replace,
    )
    want = [
        replace[1] if value == replace[0] else value
        for count, value in requests
        for _ in range(count)
    ]
    assert got.dtype == dtype
    assert got.tolist() == want


def test_fractions_are_kept():
    x = torch.tensor([0.7, 0.0, 0.95])
    got = expand_batch_to_tokens(x, torch.tensor([1, 2, 4], dtype=torch.int32), 4, 0, 1)
    assert torch.equal(got, torch.tensor([0.7, 1.0, 0.95, 0.95]))


@pytest.mark.skipif(HAS_TRITON, reason="with Triton the shipped function is right")
def test_the_shipped_function_fails_the_self_check(shipped, poisoned, monkeypatch):
    monkeypatch.setattr(rejection_sampler, "expand_batch_to_tokens", shipped)
    with pytest.raises(EngineUnsafe, match="expand_batch_to_tokens"):
        verify_fixes()


def _integers_only(x, *args, **kwargs):
    return expand_batch_to_tokens(x.to(torch.int64), *args, **kwargs)


def _never_replaces(x, counts, tokens, replace_from=0, replace_to=0):
    return expand_batch_to_tokens(x, counts, tokens)


@pytest.mark.parametrize("wrong", [_integers_only, _never_replaces])
def test_a_function_that_is_wrong_in_one_way_fails_the_self_check(wrong, monkeypatch):
    monkeypatch.setattr(rejection_sampler, "expand_batch_to_tokens", wrong)
    with pytest.raises(EngineUnsafe):
        verify_fixes()


def test_the_repair_passes_the_self_check_and_may_be_applied_twice(shipped, poisoned, monkeypatch):
    monkeypatch.setattr(rejection_sampler, "expand_batch_to_tokens", shipped)
    apply_fixes()
    apply_fixes()
    verify_fixes()
