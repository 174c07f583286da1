"""Attention of anchors over their span's rows and their own earlier draft steps.

The backward pass computes the weights anew from queries and keys, so nothing is kept that grows with
the square of a span; both passes go block by block, so nothing is allocated that does.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

QUERY_BLOCK = 512
"""Anchors of one span whose attention is computed at once."""


@dataclass(frozen=True)
class SpanRange:
    """One span's ``count`` anchors, ``anchor`` on among all anchors; its rows begin at ``row`` among
    all rows, and its first anchor is the ``before``-th of them."""

    anchor: int
    count: int
    row: int
    before: int

    def blocks(self) -> Iterator[tuple[slice, slice]]:
        """(anchors, rows that they may read); the last of both are the same positions."""
        for first in range(0, self.count, QUERY_BLOCK):
            end = min(first + QUERY_BLOCK, self.count)
            yield (
                slice(self.anchor + first, self.anchor + end),
                slice(self.row, self.row + self.before + end),
            )


def attend(
    query: Tensor, keys: Tensor, values: Tensor, own: list[tuple[Tensor, Tensor]],
    spans: list[SpanRange],
) -> Tensor:  # fmt: skip
    """[N, heads * d] for anchors' queries [N, heads, d], in the dtype of ``values``.

    keys, values [R, kv, d] are the rows of all spans; ``own`` holds the (key, value) [N, kv, d] that
    each anchor wrote at its earlier draft steps. Row r of a span is seen by the anchors at r and
    behind it.
    """
    dtype = values.dtype
    count, _, dim = query.shape
    query = query.unflatten(1, (keys.shape[1], -1)).transpose(0, 1) * dim**-0.5
    steps = [tensor.to(dtype).transpose(0, 1) for pair in own for tensor in pair]
    mixed = _Attention.apply(
        query.to(dtype).contiguous(), keys.to(dtype).transpose(0, 1), values.transpose(0, 1),
        spans, *steps,
    )  # fmt: skip
    result: Tensor = mixed.transpose(0, 1).reshape(count, -1)
    return result


class _Attention(torch.autograd.Function):
    """query [kv, N, g, d], scaled; keys, values [kv, R, d]; own keys and values [kv, N, d] in turn.

    With P the softmax over rows and own steps, O = P V, and D = sum(dO * O): dS = P * (dO V^T - D).
    """

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, keys: Tensor, values: Tensor, spans: list[SpanRange], *own: Tensor
    ) -> Tensor:
        own_keys, own_values = own[0::2], own[1::2]
        scores = _own_scores(query, own_keys)
        mixed = torch.empty_like(query)
        own_weights = torch.empty_like(scores)
        for anchors, rows in _blocks(spans):
            weights = _weights(query[:, anchors], keys[:, rows], scores[:, anchors])
            part, own_weights[:, anchors] = _split(weights, len(own_keys), query[:, anchors])
            mixed[:, anchors] = (part.to(query.dtype) @ values[:, rows]).view_as(query[:, anchors])
        for i, value in enumerate(own_values):
            mixed += own_weights[..., i, None].to(query.dtype) * value.unsqueeze(2)
        ctx.spans = spans
        ctx.save_for_backward(query, keys, values, mixed, scores, own_weights, *own)
        return mixed

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        query, keys, values, mixed, scores, own_weights, *own = ctx.saved_tensors
        own_keys, own_values = own[0::2], own[1::2]
        grad = grad_outputs[0].contiguous()
        mean = (grad * mixed).sum(-1, dtype=torch.float32)
        grad_query = torch.empty_like(query)
        grad_keys = torch.zeros(keys.shape, dtype=torch.float32, device=keys.device)
        grad_values = torch.zeros_like(grad_keys)
        for anchors, rows in _blocks(ctx.spans):
            q, g = query[:, anchors].flatten(1, 2), grad[:, anchors].flatten(1, 2)
            weights = _weights(query[:, anchors], keys[:, rows], scores[:, anchors])
            part, _ = _split(weights, len(own_keys), query[:, anchors])
            grad_values[:, rows] += part.to(g.dtype).transpose(1, 2) @ g
            inner = (g @ values[:, rows].transpose(1, 2)).float()
            inner.sub_(mean[:, anchors].flatten(1, 2).unsqueeze(-1)).mul_(part)
            inner = inner.to(q.dtype)
            grad_query[:, anchors] = (inner @ keys[:, rows]).view_as(query[:, anchors])
            grad_keys[:, rows] += inner.transpose(1, 2) @ q
        grad_own: list[Tensor] = []
        for i, (key, value) in enumerate(zip(own_keys, own_values, strict=True)):
            weight = own_weights[..., i]
            inner = weight * ((grad * value.unsqueeze(2)).sum(-1, dtype=torch.float32) - mean)
            inner = inner.to(query.dtype).unsqueeze(-1)
            grad_query += inner * key.unsqueeze(2)
            grad_own.append((inner * query).sum(2))
            grad_own.append((weight.to(grad.dtype).unsqueeze(-1) * grad).sum(2))
        return (
            grad_query, grad_keys.to(keys.dtype), grad_values.to(values.dtype), None, *grad_own
        )  # fmt: skip


def _blocks(spans: list[SpanRange]) -> Iterator[tuple[slice, slice]]:
    for span in spans:
        yield from span.blocks()


def _own_scores(query: Tensor, own_keys: tuple[Tensor, ...]) -> Tensor:
    """[kv, N, g, steps] float32."""
    scores = torch.empty(*query.shape[:3], len(own_keys), device=query.device)
    for i, key in enumerate(own_keys):
        scores[..., i] = (query * key.unsqueeze(2)).sum(-1, dtype=torch.float32)
    return scores


def _weights(query: Tensor, keys: Tensor, own_scores: Tensor) -> Tensor:
    """[kv, n * g, m + steps] float32: over the keys [kv, m, d] of queries [kv, n, g, d], the last n
    of the m rows, and over their own steps."""
    n, groups = query.shape[1:3]
    m = keys.shape[1]
    scores = torch.cat([(query.flatten(1, 2) @ keys.transpose(1, 2)).float(),
                        own_scores.flatten(1, 2)], dim=-1)  # fmt: skip
    ahead = torch.full((n, n), -torch.inf, device=query.device).triu(1)
    scores[..., m - n : m] += ahead.repeat_interleave(groups, dim=0)
    return scores.softmax(-1)


def _split(weights: Tensor, steps: int, like: Tensor) -> tuple[Tensor, Tensor]:
    """(over the rows [kv, n * g, m], over the own steps [kv, n, g, steps])."""
    m = weights.shape[-1] - steps
    return weights[..., :m], weights[..., m:].unflatten(1, like.shape[1:3])
