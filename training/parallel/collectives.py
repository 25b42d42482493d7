"""Collectives with gradients, along the first dimension of a tensor.

What a group passes on is made contiguous first: gloo reads and writes the memory of a strided tensor as if it were
contiguous, so that a loss comes out right and its gradient wrong.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def all_to_all(
    x: Tensor,
    group: dist.ProcessGroup,
    send: Sequence[int] | None = None,
    receive: Sequence[int] | None = None,
) -> Tensor:
    """Rows of `x` to the ranks of a group: `send[i]` of them to rank i, in order; equal parts when not given."""
    return _AllToAll.apply(x, group, send, receive)


def all_gather(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """`[n, ...]` of each rank -> `[ranks * n, ...]`; gradients are summed over the ranks."""
    return _AllGather.apply(x, group)


def join(x: Tensor, group: dist.ProcessGroup, counts: Sequence[int]) -> Tensor:
    """`[counts[rank]]` of each rank -> `[sum(counts)]`, where every rank goes on with the same computation.

    The gradient of the result is the same on every rank, so each takes its own part as it is: parameters' gradients,
    summed over all ranks, then count every row once.
    """
    return _Join.apply(x, group, tuple(counts))


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, group: dist.ProcessGroup, send: Sequence[int] | None, receive: Sequence[int] | None
    ) -> Tensor:
        ctx.group, ctx.send, ctx.receive = group, send, receive
        return _exchanged(x, group, send, receive)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return _exchanged(gradients[0], ctx.group, ctx.receive, ctx.send), None, None, None


def _exchanged(
    x: Tensor, group: dist.ProcessGroup, send: Sequence[int] | None, receive: Sequence[int] | None
) -> Tensor:
    rows = x.shape[0] if receive is None else sum(receive)
    out = x.new_empty(rows, *x.shape[1:])
    dist.all_to_all_single(
        out,
        x.contiguous(),
        None if receive is None else list(receive),
        None if send is None else list(send),
        group=group,
    )
    return out


class _AllGather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return _gathered(x, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        gradient = gradients[0].contiguous()
        out = gradient.new_empty(gradient.shape[0] // dist.get_world_size(ctx.group), *gradient.shape[1:])
        dist.reduce_scatter_single(out, gradient, group=ctx.group)
        return out, None


def _gathered(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    out = x.new_empty(dist.get_world_size(group) * x.shape[0], *x.shape[1:])
    dist.all_gather_single(out, x.contiguous(), group=group)
    return out


class _Join(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup, counts: tuple[int, ...]) -> Tensor:
        rank, longest = dist.get_rank(group), max(counts)
        ctx.mine = slice(sum(counts[:rank]), sum(counts[: rank + 1]))
        padded = x.new_zeros(longest)
        padded[: len(x)] = x
        rows = _gathered(padded, group).reshape(len(counts), longest) if longest else x.new_empty(len(counts), 0)
        return torch.cat([row[:count] for row, count in zip(rows, counts, strict=True)])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return gradients[0][ctx.mine], None, None
