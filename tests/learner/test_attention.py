import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import learner.drafters.attention as attention
from learner.drafters.attention import SpanRange, attend

torch.set_num_threads(1)

HEADS, KV, DIM = 4, 2, 6


def plain(query, keys, values, own, spans):
    """One anchor and head at a time."""
    outputs = []
    for span in spans:
        for i in range(span.anchor, span.anchor + span.count):
            rows = slice(span.row, span.row + span.before + i - span.anchor + 1)
            heads = []
            for h in range(HEADS):
                kv = h // (HEADS // KV)
                key = torch.cat([keys[rows, kv], *(k[i : i + 1, kv] for k, _ in own)])
                value = torch.cat([values[rows, kv], *(v[i : i + 1, kv] for _, v in own)])
                heads.append((key @ query[i, h] / DIM**0.5).softmax(0) @ value)
            outputs.append(torch.cat(heads))
    return torch.stack(outputs)


def layout(counts):
    """Spans of (rows before the first anchor, anchors)."""
    spans, anchor, row = [], 0, 0
    for before, count in counts:
        spans.append(SpanRange(anchor, count, row, before))
        anchor += count
        row += before + count
    return spans, anchor, row


@settings(max_examples=25, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 4), st.integers(0, 6)), min_size=1, max_size=3).filter(
        lambda counts: any(count for _, count in counts)
    ),
    st.integers(0, 2),
    st.sampled_from([1, 2, 512]),
    st.integers(0, 2**31),
)
def test_attention_has_the_value_and_gradients_of_its_formula(counts, steps, block, seed):
    spans, anchors, rows = layout(counts)
    generator = torch.Generator().manual_seed(seed)

    def leaf(*shape):
        return torch.randn(*shape, generator=generator).requires_grad_()

    query, keys, values = leaf(anchors, HEADS, DIM), leaf(rows, KV, DIM), leaf(rows, KV, DIM)
    own = [(leaf(anchors, KV, DIM), leaf(anchors, KV, DIM)) for _ in range(steps)]
    leaves = [query, keys, values, *(tensor for pair in own for tensor in pair)]
    before, attention.QUERY_BLOCK = attention.QUERY_BLOCK, block
    try:
        got = attend(query, keys, values, own, spans)
        weight = torch.randn(got.shape, generator=generator)
        got_grads = torch.autograd.grad((got * weight).sum(), leaves)
    finally:
        attention.QUERY_BLOCK = before
    expected = plain(query, keys, values, own, spans)
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)
    grads = torch.autograd.grad((expected * weight).sum(), leaves, allow_unused=True)
    for one, other in zip(got_grads, grads, strict=True):
        other = torch.zeros_like(one) if other is None else other
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def test_under_autocast_it_runs_in_the_dtype_of_the_values():
    spans, anchors, rows = layout([(3, 5)])
    query, keys, values = (torch.randn(n, KV, DIM) for n in (anchors, rows, rows))
    query = torch.cat([query, query], dim=1)
    exact = attend(query, keys, values, [], spans)
    rounded = attend(query, keys, values.bfloat16(), [], spans)
    assert rounded.dtype == torch.bfloat16
    torch.testing.assert_close(rounded.float(), exact, rtol=0.05, atol=0.05)
