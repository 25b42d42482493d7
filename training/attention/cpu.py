"""Attention as one `scaled_dot_product_attention` a span: the kernel of the CPU, and of fp32 on a GPU.

On a CPU this is 6.5 times faster at 8k tokens than one call with a block mask over the row (754 against 4901 ms, fp32,
one thread). A span whose queries are all its keys needs no mask; the others get a small one, `[n, m]`, made once.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from training.attention.packed import Packed, keep_mask
from training.geometry import Span


def attention(q: Tensor, k: Tensor, v: Tensor, packed: Packed, scale: float, window: int | None) -> Tensor:
    """`[T, Hq, D]`, `[T, Hk, D]` twice -> `[T, Hq, D]`."""
    spans = packed.seen(window)
    masks = packed.once(("masks", window, q.device), lambda: [_mask(s, window, q.device) for s in spans])
    parts = zip(q.split([s.n for s in spans]), packed.keys(k, window), packed.keys(v, window), masks, strict=True)
    return torch.cat([_one(*part, scale=scale) for part in parts])


def _mask(span: Span, window: int | None, device: torch.device) -> Tensor | None:
    if span.n == span.m and (window is None or span.m <= window):
        return None  # plainly causal
    return keep_mask(span.n, span.m, window, device)


def _one(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, *, scale: float) -> Tensor:
    query, key, value = (x.transpose(0, 1)[None] for x in (q, k, v))
    out = scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=mask,
        is_causal=mask is None,
        scale=scale,
        enable_gqa=q.shape[1] != k.shape[1],
    )
    return out[0].transpose(0, 1)
