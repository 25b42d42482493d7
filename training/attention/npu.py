"""Attention as `npu_fusion_attention` in TND layout (Ascend).

The operator wants: running ends as host integers without a leading 0, the last equal to the number of tokens; a
2048 x 2048 boolean mask in which True hides, to which `sparse_mode` 3 (causal, aligned at the end) or 4 (a band) refers
whatever the lengths; contiguous tensors; at most 1024 segments a call, so a longer row is several calls. Without a mask
it would attend to everything, and its own default scale is 1.

Source: torch_npu's documentation of `npu_fusion_attention`; sparse modes 3 and 4 have their origin at the bottom right.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from training.attention.packed import Packed, ends
from training.geometry import Span

SEGMENTS = 1024
"""Most segments of one call."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One call's share of a row: its query rows, its spans, and what the operator is told of them."""

    rows: slice
    spans: slice
    options: dict[str, Any]


def calls(packed: Packed, window: int | None, limit: int = SEGMENTS) -> list[Call]:
    """The calls that serve a row: as few as the limit on segments allows, each over whole spans."""
    spans = packed.seen(window)
    firsts = range(0, len(spans), limit)
    return [_call(spans, first, min(first + limit, len(spans)), window) for first in firsts]


def _call(spans: Sequence[Span], first: int, last: int, window: int | None) -> Call:
    mode = {"sparse_mode": 3} if window is None else {"sparse_mode": 4, "pre_tockens": window - 1, "next_tockens": 0}
    borders = {
        "actual_seq_qlen": ends([span.n for span in spans[first:last]]),
        "actual_seq_kvlen": ends([span.m for span in spans[first:last]]),
    }
    return Call(rows=slice(spans[first].q0, spans[last - 1].q1), spans=slice(first, last), options=borders | mode)


def hide_mask(device: torch.device | None = None) -> Tensor:
    """The compressed mask of sparse modes 3 and 4: True hides, the opposite of torch's own operators."""
    return torch.ones(2048, 2048, dtype=torch.bool, device=device).triu(1)


@cache
def _hidden(device: torch.device) -> Tensor:
    return hide_mask(device)


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    packed: Packed,
    scale: float,
    window: int | None,
    operator: Callable[..., Any] | None = None,
) -> Tensor:
    """`[T, Hq, D]`, `[T, Hk, D]` twice -> `[T, Hq, D]`; `operator` stands in for `npu_fusion_attention` in tests."""
    fused: Callable[..., Any] = operator or importlib.import_module("torch_npu").npu_fusion_attention
    mask = _hidden(q.device)
    keys, values = packed.keys(k, window), packed.keys(v, window)
    out: list[Tensor] = []
    for call in packed.once(("tnd", window), lambda: calls(packed, window)):
        told = {"atten_mask": mask, "scale": scale, "keep_prob": 1.0, **call.options}
        query, key, value = q[call.rows].contiguous(), torch.cat(keys[call.spans]), torch.cat(values[call.spans])
        out.append(fused(query, key, value, q.shape[1], "TND", **told)[0])
    return torch.cat(out)
