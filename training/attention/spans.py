"""Attention as one `scaled_dot_product_attention` a span: what serves every device, width and window.

A span whose queries are all its keys needs no mask; the others get a small one, `[n, m]`, made once. Under a sliding
window a span is cut into blocks of queries, each with the keys that its window reaches, so that cost and masks grow
with the window and not with the span.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from training.attention.packed import Packed, keep_mask
from training.geometry import Span

BLOCK = 256
"""Queries of a block under a window."""


def attention(q: Tensor, k: Tensor, v: Tensor, packed: Packed, scale: float, window: int | None) -> Tensor:
    """`[T, Hq, D]`, `[T, Hk, D]` twice -> `[T, Hq, D]`."""
    row = packed if window is None else packed.once(("blocks", window), lambda: _in_blocks(packed))
    spans = row.seen(window)
    masks = row.once(("masks", window, q.device), lambda: [_mask(s, window, q.device) for s in spans])
    parts = zip(q.split([s.n for s in spans]), row.keys(k, window), row.keys(v, window), masks, strict=True)
    return torch.cat([_one(*part, scale=scale) for part in parts])


def _in_blocks(packed: Packed) -> Packed:
    blocks = [span.cut(a, a + BLOCK) for span in packed.spans for a in range(span.q0, span.q1, BLOCK)]
    return Packed(blocks, packed.total, packed.world)


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
