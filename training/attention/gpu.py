"""Attention as one variable-length flash call a layer (`torch.nn.attention.varlen`).

Queries and keys have borders of their own, so a shared prompt's keys may stand in several segments; the kernel is
causal and aligned at the end. Flash kernels take half precision, and heads whose width is a multiple of 8 up to 256:
other rows go span by span.

Source: `torch.nn.attention.varlen`; Dao 2023, FlashAttention-2, arXiv:2307.08691.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from training.attention import spans
from training.attention.packed import Packed, borders
from training.parallel.device import sent

WIDEST = 256
"""Widest head that the flash kernels take."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Arguments:
    """What `varlen_attn` is told of a row: borders as int32 `[spans + 1]`, longest segments, window to the left."""

    cu_q: Tensor
    cu_k: Tensor
    max_q: int
    max_k: int
    window: tuple[int, int]


def arguments(packed: Packed, window: int | None, device: torch.device) -> Arguments:
    """The borders of a row's spans; `window` counts the query itself, the kernel's left window does not."""
    spans = packed.seen(window)
    cu_q, cu_k = borders([s.n for s in spans]), borders([s.m for s in spans])
    assert cu_q[-1] == packed.queries
    return Arguments(
        cu_q=sent(torch.tensor(cu_q, dtype=torch.int32), device),
        cu_k=sent(torch.tensor(cu_k, dtype=torch.int32), device),
        max_q=max(s.n for s in spans),
        max_k=max(s.m for s in spans),
        window=(-1 if window is None else window - 1, 0),
    )


def served(q: Tensor, v: Tensor) -> bool:
    """Whether a flash kernel takes queries and values of this precision and width."""
    width = q.shape[-1]
    return q.dtype in (torch.bfloat16, torch.float16) and width == v.shape[-1] <= WIDEST and width % 8 == 0


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    packed: Packed,
    scale: float,
    window: int | None,
    operator: Callable[..., Any] | None = None,
) -> Tensor:
    """`[T, Hq, D]`, `[T, Hk, D]` twice -> `[T, Hq, D]`; `operator` stands in for `varlen_attn` in tests."""
    if operator is None:
        if not served(q, v):
            return spans.attention(q, k, v, packed, scale, window)
        from torch.nn.attention.varlen import varlen_attn as operator
    told = packed.once(("varlen", window, q.device), lambda: arguments(packed, window, q.device))
    out = operator(
        q.contiguous(),
        torch.cat(packed.keys(k, window)),
        torch.cat(packed.keys(v, window)),
        told.cu_q,
        told.cu_k,
        told.max_q,
        told.max_k,
        scale=scale,
        window_size=told.window,
        enable_gqa=q.shape[1] != k.shape[1],
        num_splits=1,  # sums do not depend on what else lies in the row
    )
    assert isinstance(out, Tensor)
    return out
