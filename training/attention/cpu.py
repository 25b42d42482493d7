"""Attention on a CPU: a row's spans cut into rectangles without a mask and small causal squares on the diagonal.

torch's flash kernel for the CPU reaches the rate of a matrix product where every query sees every key, and half of it
or less where a mask or causality hides some, because it computes whole blocks all the same. So a span's own keys are
halved again and again: of two neighbouring blocks the later one's queries see all of the earlier one's keys, and only
squares of `BLOCK` on the diagonal are left causal. Equal blocks of a span are one batched call; keys before the span's
own (a shared prompt, earlier chunks) are one rectangle each. A query's partial results are joined by their log-sums of
exponentials, which is exact; with the joined output and log-sum each piece's gradient is its share of the whole one.

Cost: the scores the spans hold and `BLOCK / 2` a query more, about a fifth less time than one call a span on real
preference pairs. What depends on a span is cut by the span alone: its neighbours in the row change no bit of it.

Source: Dao et al., FlashAttention-2 (2023), section 3.1 for joining and for the backward pass.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from training.attention import spans
from training.attention.packed import Packed
from training.geometry import Span

BLOCK = 64
"""Queries of the causal squares on the diagonal."""


@dataclass(frozen=True, slots=True)
class Piece:
    """`count` rectangles of n query and m key rows, the first at (q0, k0), each `step` rows further on both sides.

    A causal piece is square; a span's causal pieces hold each of its queries exactly once, and come first.
    """

    q0: int
    k0: int
    n: int
    m: int
    causal: bool = False
    count: int = 1
    step: int = 0


def pieces(span: Span, block: int = BLOCK) -> Iterator[Piece]:
    """The pieces of a span: together every (query, key) pair it holds, each once."""
    (*before, (first, last)), n = _touching(span.keys), span.n
    own = last - n  # the row of the first query's own key
    assert own >= first, f"the last keys of {span} are not its queries in a run"
    whole, rest = divmod(n, block)
    if whole:
        yield Piece(span.q0, own, block, block, causal=True, count=whole, step=block)
    if rest:
        yield Piece(span.q1 - rest, last - rest, rest, rest, causal=True)
    for a, b in (*before, (first, own)):
        if a < b:
            yield Piece(span.q0, a, n, b - a)
    size = block
    while size < n:  # the queries of every other block of this size, and the keys of the block before
        whole, rest = divmod(n, 2 * size)
        if whole:
            yield Piece(span.q0 + size, own, size, size, count=whole, step=2 * size)
        if rest > size:
            start = 2 * size * whole
            yield Piece(span.q0 + start + size, own + start, rest - size, size)
        size *= 2


def _touching(ranges: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """The same rows in as few ranges as possible: keys come cut where chunks end, though chunks of a rank may touch."""
    joined: list[tuple[int, int]] = []
    for a, b in ranges:
        start = joined.pop()[0] if joined and joined[-1][1] == a else a
        joined.append((start, b))
    return joined


def attention(q: Tensor, k: Tensor, v: Tensor, packed: Packed, scale: float, window: int | None) -> Tensor:
    """`[T, Hq, D]`, `[T, Hk, D]` twice -> `[T, Hq, D]`; with a window, or values of another width, span by span."""
    if window is not None or v.shape[-1] != q.shape[-1]:
        return spans.attention(q, k, v, packed, scale, window)
    todo = packed.once("pieces", lambda: [piece for span in packed.spans for piece in pieces(span)])
    return _Attention.apply(*(x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v)), todo, scale)


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, todo: Sequence[Piece], scale: float) -> Tensor:
        exact = torch.promote_types(q.dtype, torch.float32)  # joined in fp32, whatever the precision of the products
        out = torch.empty_like(q, dtype=exact)
        log_sums = q.new_empty(q.shape[:2], dtype=exact)
        for piece in todo:
            part, log_sum = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
                *_operands(piece, q, k, v), 0.0, piece.causal, scale=scale
            )
            joined, total = _rows(out, piece.q0, piece.n, piece), _rows(log_sums, piece.q0, piece.n, piece)
            if piece.causal:
                joined.copy_(part)
                total.copy_(log_sum)
            else:
                joined.lerp_(part.to(exact), (log_sum - total).sigmoid_()[..., None])
                total.copy_(torch.logaddexp(total, log_sum))
        out = out.to(q.dtype)
        ctx.save_for_backward(q, k, v, out, log_sums)
        ctx.todo, ctx.scale = todo, scale
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, log_sums = ctx.saved_tensors
        gradient = gradients[0].contiguous()
        d_q, d_k, d_v = (torch.zeros_like(x, dtype=log_sums.dtype) for x in (q, k, v))
        for piece in ctx.todo:
            parts = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
                _rows(gradient, piece.q0, piece.n, piece),
                *_operands(piece, q, k, v),
                *(_rows(x, piece.q0, piece.n, piece) for x in (out, log_sums)),
                0.0,
                piece.causal,
                scale=ctx.scale,
            )
            for total, part in zip(_operands(piece, d_q, d_k, d_v), parts, strict=True):
                total.add_(part)
        return d_q.to(q.dtype), d_k.to(k.dtype), d_v.to(v.dtype), None, None


def _operands(piece: Piece, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    keys, values = (_rows(x, piece.k0, piece.m, piece) for x in (k, v))
    return _rows(q, piece.q0, piece.n, piece), keys, values


def _rows(x: Tensor, start: int, length: int, piece: Piece) -> Tensor:
    """A piece's rows of `[T, H, ...]` as a view `[count, H, length, ...]`."""
    row, head, *rest = x.stride()
    size = (piece.count, x.shape[1], length, *x.shape[2:])
    return x.as_strided(size, (piece.step * row, head, row, *rest), x.storage_offset() + start * row)
