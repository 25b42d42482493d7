"""The language-model head: log-probabilities of the supervised tokens, without a matrix of [tokens, vocabulary].

Only hidden rows that predict a supervised token come here, and go through a chunk at a time. How a row's
log-probability depends on its logits is known in the forward pass, but how much the loss depends on that
log-probability only after it; so the exponentials of as many rows as `KEPT_BYTES` hold stay for the backward pass,
which then needs no second product with the vocabulary, and those of further rows are computed again. Memory: a chunk
and `KEPT_BYTES`, however long the row and large the vocabulary. Sums over the vocabulary are fp32 whatever the
precision of the matrix product.

Shapes: R supervised rows, H width of the model, V vocabulary, c rows of a chunk.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

CHUNK = 512
"""Supervised rows that go through the head at a time."""
KEPT_BYTES = 1 << 29
"""Room for the exponentials that stay between the forward and the backward pass of one pack."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Head:
    """The language-model head: `cap * tanh(scale * (hidden @ weight.T + bias) / cap)`, without a cap just scaled."""

    weight: Tensor
    bias: Tensor | None
    scale: float
    cap: float | None


def row_logps(
    hidden: Tensor, target: Tensor, head: Head, *, chunk: int = CHUNK, kept_bytes: int = KEPT_BYTES
) -> Tensor:
    """Log-probability of each row's target: `[R, H]`, `[R]` -> float32 `[R]`."""
    dtype = torch.get_autocast_dtype(hidden.device.type) if _autocast(hidden) else hidden.dtype
    kept = 0 if head.cap is not None else kept_bytes // (4 * len(head.weight))
    return _RowLogps.apply(
        hidden.to(dtype), head.weight.to(dtype), head.bias, target, head.scale, head.cap, chunk, kept
    )


def _autocast(x: Tensor) -> bool:
    return torch.is_autocast_enabled(x.device.type)


class _RowLogps(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        target: Tensor,
        scale: float,
        cap: float | None,
        chunk: int,
        kept: int,
    ) -> Tensor:
        logps = hidden.new_empty(len(target), dtype=torch.float32)
        log_sums = torch.empty_like(logps)
        ctx.kept = []
        for part in _chunks(len(target), chunk):
            logits, _ = _logits(hidden[part], weight, bias, scale, cap)
            hit = logits.gather(1, target[part, None])[:, 0]
            log_sums[part], sums = _exponentials(logits)
            logps[part] = hit - log_sums[part]
            if any(ctx.needs_input_grad) and part.stop <= kept:
                ctx.kept.append((logits, sums))
        ctx.save_for_backward(hidden, weight, bias, target, log_sums)
        ctx.scale, ctx.cap, ctx.chunk = scale, cap, chunk
        return logps

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,) = gradients
        hidden, weight, bias, target, log_sums = ctx.saved_tensors
        d_hidden = torch.empty_like(hidden)
        d_weight = torch.zeros(weight.shape, dtype=torch.float32, device=weight.device)
        d_bias = None if bias is None else torch.zeros_like(bias, dtype=torch.float32)
        kept, ctx.kept = ctx.kept, []  # overwritten below; a second backward pass computes them again
        for number, part in enumerate(_chunks(len(target), ctx.chunk)):
            g, slope = gradient[part, None], ctx.scale
            if number < len(kept):
                exponentials, sums = kept[number]
                d_logits = exponentials.mul_(-g / sums)  # -g * softmax
            else:
                logits, slope = _logits(hidden[part], weight, bias, ctx.scale, ctx.cap)
                d_logits = logits.sub_(log_sums[part, None]).exp_().mul_(-g)
            d_logits.scatter_add_(1, target[part, None], g)  # + g at the target
            d_logits = d_logits * slope if isinstance(slope, Tensor) or slope != 1 else d_logits
            low = d_logits.to(hidden.dtype)
            d_hidden[part] = low @ weight
            if low.dtype == torch.float32:
                d_weight.addmm_(low.t(), hidden[part])  # in place: no second matrix of the head's size
            else:
                d_weight += low.t() @ hidden[part]
            if d_bias is not None:
                d_bias += d_logits.sum(0)
        return d_hidden, d_weight.to(weight.dtype), d_bias, *[None] * 5


def _exponentials(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Turn each row of `[c, V]` into exponentials of its distance to its peak; log-sums `[c]` and sums `[c, 1]`.

    In place, because a chunk is large enough that each temporary costs its pages anew: about twice as fast on a CPU as
    `logsumexp` at a vocabulary of 152k.
    """
    peak = logits.amax(-1, keepdim=True)
    sums = logits.sub_(peak).exp_().sum(-1, keepdim=True)
    return (sums.log() + peak)[:, 0], sums


def _logits(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, scale: float, cap: float | None
) -> tuple[Tensor, Tensor | float]:
    """fp32 logits of a chunk `[c, V]`, and their slope with respect to the matrix product."""
    logits = (hidden @ weight.t()).float()
    if bias is not None:
        logits = logits + bias.float()
    logits = logits * scale if scale != 1 else logits
    if cap is None:
        return logits, scale
    squashed = torch.tanh(logits / cap)
    return squashed * cap, (1 - squashed.square()) * scale


def _chunks(rows: int, chunk: int) -> list[slice]:
    return [slice(start, min(rows, start + chunk)) for start in range(0, rows, chunk)]
