"""Strict stand-ins for the attention operators of devices, by their documentation, on a host.

`fusion_attention` is `torch_npu.npu_fusion_attention` in TND layout, `varlen_attention` is torch's `varlen_attn`. Both
compute the definition, a segment at a time, and refuse every argument outside what is documented; also what a device
would take in silence and compute otherwise (a mask of the other polarity, no mask at all, borders that are lengths).

Sources: Ascend op-plugin, `npu_fusion_attention`, and CANN, `aclnnFlashAttentionVarLenScore`; for the other
`torch.nn.attention.varlen`, and FlashAttention-2 for what its kernels take.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

FULL = 2147483647
FUSION_SEGMENTS = 1024
COMPRESSED = torch.ones(2048, 2048, dtype=torch.bool).triu(1)


class OperatorError(RuntimeError):
    """An argument that the operator does not take, or takes to mean something else."""


def check(holds: object, sentence: str) -> None:
    """Refuse a call with a sentence."""
    if not holds:
        raise OperatorError(sentence)


def segment(q: Tensor, k: Tensor, v: Tensor, scale: float, left: int, right: int) -> tuple[Tensor, Tensor, Tensor]:
    """Attention of one segment, aligned at its end: `[n, Hq, D]` -> output `[n, Hq, Dv]`, largest score, sum of exps.

    Query i sees the keys from `left` before its own place to `right` after it.
    """
    n, m, group = len(q), len(k), q.shape[1] // k.shape[1]
    before = torch.arange(m - n, m)[:, None] - torch.arange(m)
    hide = (before > left) | (before < -right)
    check(not hide.all(1).any(), f"a query of a segment of {n} queries and {m} keys sees no key")
    k, v = (x.repeat_interleave(group, 1).float() for x in (k, v))
    scores = torch.einsum("ihd,jhd->hij", q.float(), k) * scale
    scores = scores.masked_fill(hide, float("-inf"))
    peak = scores.amax(-1, keepdim=True)
    weights = (scores - peak).exp()
    total = weights.sum(-1, keepdim=True)
    out = torch.einsum("hij,jhd->ihd", weights / total, v)
    return out, peak[..., 0].t(), total[..., 0].t()


def _ends(name: str, given: Any, tokens: int) -> list[int]:
    check(isinstance(given, list | tuple), f"{name} is {type(given).__name__}; it is a list on the host, not a tensor")
    check(all(type(end) is int for end in given), f"{name} holds something that is no int")
    check(1 <= len(given) <= FUSION_SEGMENTS, f"{name} has {len(given)} segments; a call takes 1 to {FUSION_SEGMENTS}")
    check(given[0] > 0, f"{name} begins with {given[0]}: running ends have no leading 0")
    check(all(a < b for a, b in pairwise(given)), f"{name} does not rise: running ends are no lengths")
    check(given[-1] == tokens, f"{name} ends at {given[-1]} of {tokens} tokens")
    return list(given)


def fusion_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    head_num: int,
    input_layout: str,
    *,
    atten_mask: Tensor | None = None,
    scale: float = 1.0,
    keep_prob: float = 1.0,
    pre_tockens: int = FULL,
    next_tockens: int = FULL,
    actual_seq_qlen: Sequence[int] | None = None,
    actual_seq_kvlen: Sequence[int] | None = None,
    sparse_mode: int = 0,
    **rest: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor, int, int, int]:
    """`[T, N, D]` -> output, largest scores and sums of exponentials `[T, N, 8]`; what dropout would give is empty.

    Raises:
        OperatorError: names the argument and the rule.
    """
    given = {"query": query, "key": key, "value": value}
    check(input_layout == "TND", f"layout {input_layout!r}; packed rows are TND")
    unserved = {name: x for name, x in rest.items() if isinstance(x, Tensor) or name in ("prefix", "pse")}
    check(all(x is None for x in unserved.values()), f"{sorted(unserved)} are not part of this stand-in")
    check(keep_prob == 1.0, f"keep_prob {keep_prob}: log-probabilities need attention without dropout")
    for name, x in given.items():
        check(x.ndim == 3, f"{name} has {x.ndim} dimensions; TND has 3")
        check(x.is_contiguous(), f"{name} is not contiguous")
        check(x.dtype in (torch.float16, torch.bfloat16, torch.float32), f"{name} is {x.dtype}; not on this device")
        check(x.dtype == query.dtype, f"{name} is {x.dtype}, the query {query.dtype}")
        check(1 <= len(x) <= 1_000_000, f"{name} has {len(x)} tokens; a call takes 1 to 1000000")
    heads, key_heads, width = query.shape[1], key.shape[1], query.shape[2]
    check(key.shape[:2] == value.shape[:2], f"keys are {tuple(key.shape)}, values {tuple(value.shape)}")
    check(key.shape[2] == width >= value.shape[2], "widths must be query = key >= value")
    check(1 <= width <= 768, f"heads are {width} wide; at most 768")
    check(head_num == heads, f"head_num {head_num}, but the query has {heads} heads")
    check(1 <= heads <= 256 and heads % key_heads == 0, f"{heads} query heads over {key_heads} key heads")
    check(atten_mask is not None, "without atten_mask every query sees every key, whatever sparse_mode says")
    assert atten_mask is not None
    check(atten_mask.dtype in (torch.bool, torch.uint8), f"atten_mask is {atten_mask.dtype}")
    check(tuple(atten_mask.shape) == (2048, 2048), f"atten_mask is {tuple(atten_mask.shape)}; sparse modes take 2048²")
    check(torch.equal(atten_mask.bool(), COMPRESSED), "atten_mask must hide (True) what lies above the diagonal")
    check(sparse_mode in (3, 4), f"sparse_mode {sparse_mode} is not aligned at the end: 3 (causal) or 4 (band) are")
    q_ends = _ends("actual_seq_qlen", actual_seq_qlen, len(query))
    k_ends = _ends("actual_seq_kvlen", actual_seq_kvlen, len(key))
    check(len(q_ends) == len(k_ends), f"{len(q_ends)} segments of queries, {len(k_ends)} of keys")
    left, right = (FULL, 0) if sparse_mode == 3 else (pre_tockens, next_tockens)
    check(left >= 0 and right == 0, f"a band from {left} before to {right} after is not causal")
    parts = []
    for (q0, q1), (k0, k1) in zip(pairwise([0, *q_ends]), pairwise([0, *k_ends]), strict=True):
        check(q1 - q0 <= k1 - k0, f"sparse_mode {sparse_mode} takes no segment of {q1 - q0} queries and {k1 - k0} keys")
        parts.append(segment(query[q0:q1], key[k0:k1], value[k0:k1], scale, left, right))
    out, peak, total = (torch.cat(x) for x in zip(*parts, strict=True))
    peak, total = (x.detach()[..., None].expand(*x.shape, 8).contiguous() for x in (peak, total))
    return out.to(query.dtype), peak, total, query.new_empty(0), 0, 0, 0


def _borders(name: str, given: Tensor, tokens: int, longest: int) -> list[int]:
    check(given.dtype == torch.int32 and given.ndim == 1, f"{name} is {given.dtype}{list(given.shape)}; int32[N + 1]")
    borders: list[int] = given.tolist()
    check(borders[0] == 0, f"{name} begins with {borders[0]}: borders have a leading 0")
    check(all(a < b for a, b in pairwise(borders)), f"{name} does not rise")
    check(borders[-1] == tokens, f"{name} ends at {borders[-1]} of {tokens} tokens")
    found = max(b - a for a, b in pairwise(borders))
    check(type(longest) is int and longest == found, f"the longest segment of {name} is {found}, not {longest}")
    return borders


def varlen_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor,
    max_q: int,
    max_k: int,
    *,
    scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
    enable_gqa: bool = False,
    num_splits: int | None = None,
    half: bool = True,
) -> Tensor:
    """`[T, Hq, D]` -> `[T, Hq, D]`; the kernel's causal mask is aligned at the end of each segment.

    Without `half` it takes every precision: what a layout means does not depend on it.

    Raises:
        OperatorError: names the argument and the rule.
    """
    for name, x in {"query": query, "key": key, "value": value}.items():
        low = x.dtype in (torch.float16, torch.bfloat16)
        check(low or not half, f"{name} is {x.dtype}; flash kernels take half precision")
        check(x.dtype == query.dtype and x.device == query.device, f"{name} is {x.dtype} on {x.device}")
        check(x.ndim == 3 and x.is_contiguous(), f"{name} is no contiguous [T, H, D]")
        check(x.shape[2] == query.shape[2], f"{name} is {x.shape[2]} wide, the query {query.shape[2]}")
    heads, key_heads, width = query.shape[1], key.shape[1], query.shape[2]
    check(width % 8 == 0 and width <= 256, f"heads are {width} wide; a multiple of 8, at most 256")
    check(key.shape == value.shape, f"keys are {tuple(key.shape)}, values {tuple(value.shape)}")
    check(enable_gqa or heads == key_heads, f"{heads} query and {key_heads} key heads without enable_gqa")
    check(heads % key_heads == 0, f"{heads} query heads over {key_heads} key heads")
    check(num_splits == 1, "without num_splits = 1 a result depends on what else lies in the row")
    q_borders = _borders("cu_seq_q", cu_seq_q, len(query), max_q)
    k_borders = _borders("cu_seq_k", cu_seq_k, len(key), max_k)
    check(len(q_borders) == len(k_borders), f"{len(q_borders)} borders of queries, {len(k_borders)} of keys")
    left, right = window_size
    check(right == 0, f"window_size {window_size} lets queries see later keys")
    parts = []
    for (q0, q1), (k0, k1) in zip(pairwise(q_borders), pairwise(k_borders), strict=True):
        part = segment(
            query[q0:q1],
            key[k0:k1],
            value[k0:k1],
            width**-0.5 if scale is None else scale,
            FULL if left < 0 else left,
            0,
        )
        parts.append(part[0])
    return torch.cat(parts).to(query.dtype)
