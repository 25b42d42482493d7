"""Ulysses: the ranks of a group exchange parts of the sequence for parts of the heads around attention.

Source: Jacobs et al. 2023, DeepSpeed Ulysses, arXiv:2309.14509. Queries, keys and values travel in one all-to-all, the
outputs in another. Where key and value heads do not divide by the degree, each is repeated the fewest times that make
them: the repeated heads serve neighbouring query heads, as the one did before.

Shapes: t tokens of a rank, n ranks, T = n * t, Hq query heads, Hk key and value heads, D width of a head.
"""

from __future__ import annotations

from math import lcm

import torch
import torch.distributed as dist
from torch import Tensor

from training.parallel.collectives import all_to_all


def scatter_heads(q: Tensor, k: Tensor, v: Tensor, group: dist.ProcessGroup | None) -> tuple[Tensor, Tensor, Tensor]:
    """`[t, Hq, D]`, `[t, Hk, D]` twice -> `[T, Hq / n, D]`, `[T, lcm(Hk, n) / n, D]` twice, tokens by rank."""
    if group is None:
        return q, k, v
    ranks, (tokens, _, width) = dist.get_world_size(group), q.shape
    times = lcm(k.shape[1], ranks) // k.shape[1]
    k, v = (x if times == 1 else x.repeat_interleave(times, 1) for x in (k, v))
    parts = [x.reshape(tokens, ranks, -1, width) for x in (q, k, v)]
    sent = torch.cat(parts, 2).transpose(0, 1)  # [n, t, heads, D]
    received = all_to_all(sent, group).flatten(0, 1)
    a, b, c = received.split([part.shape[2] for part in parts], 1)
    return a, b, c


def gather_heads(x: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """`[T, Hq / n, D]` -> `[t, Hq, D]`."""
    if group is None:
        return x
    ranks = dist.get_world_size(group)
    received = all_to_all(x, group).reshape(ranks, x.shape[0] // ranks, *x.shape[1:])
    return received.transpose(0, 1).flatten(1, 2)
