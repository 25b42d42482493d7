"""A row's spans in the forms that attention kernels take.

Keys of all spans lie one after the other, each span's in position order. They are gathered by splitting the row once at
every border and joining the pieces: the backward of a split is one join, and a piece that several spans read (a shared
prompt) adds its gradients in a fixed order, where an index would add them atomically in any.

A window is a number of tokens a query sees, itself included; what no query of a span can see is cut from the front of
the span's keys, which keeps it exact because kernels align queries and keys at their end.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from typing import TypeVar

import torch
from torch import Tensor

from training.geometry import Pack, Span
from training.parallel.mesh import ALONE, World
from training.sharding import Placement, shard

T = TypeVar("T")


class Packed:
    """The spans of a row of `total` tokens, or those of one context rank: its queries, the keys of the whole row.

    Spans tile the queries in order. `world` says with whom the row is shared. What kernels derive from them is made
    once and kept as long as this object: all layers of a model, and the forward and backward pass, share it.
    """

    def __init__(self, spans: Sequence[Span], total: int, world: World = ALONE) -> None:
        ends = [0, *(span.q1 for span in spans)]
        self.spans, self.total, self.world = tuple(spans), total, world
        tiled = all(s.q0 == a < s.q1 for s, a in zip(spans, ends, strict=False))
        assert ends[-1] == self.queries and tiled, (spans, total)
        self.longest = max((span.m for span in spans), default=0)
        self._made: dict[object, object] = {}

    @classmethod
    def of(cls, pack: Pack, placement: Placement | None = None, world: World = ALONE) -> Packed:
        """The spans of a pack, or those of this rank's context rank."""
        spans = pack.spans if placement is None else shard(pack, placement, cp_rank=world.cp_rank).spans
        return cls(spans, pack.total, world)

    def __repr__(self) -> str:
        return f"Packed({len(self.spans)} spans, {self.total} tokens)"

    @property
    def queries(self) -> int:
        """Rows whose attention this rank's kernels compute."""
        return self.total // self.world.topology.cp

    @property
    def tokens(self) -> int:
        """Tokens of this rank."""
        return self.total // self.world.topology.sp

    def once(self, name: object, make: Callable[[], T]) -> T:
        """What `make` gives, made at the first call with this name."""
        if name not in self._made:
            self._made[name] = make()
        return self._made[name]  # pyright: ignore[reportReturnType]  # one name, one maker

    def seen(self, window: int | None) -> tuple[Span, ...]:
        """The spans, without the keys that the window hides from all of a span's queries."""
        return self.once(("seen", window), lambda: tuple(s.cut(s.q0, s.q1, window) for s in self.spans))

    def keys(self, x: Tensor, window: int | None) -> list[Tensor]:
        """Keys or values `[T, Hk, D]` -> those of each span, `[m, Hk, D]`, in order."""
        sizes, chosen = self.once(("pieces", window), lambda: _pieces(self.seen(window), self.total))
        pieces = x.split(sizes)
        return [pieces[p[0]] if len(p) == 1 else torch.cat([pieces[i] for i in p]) for p in chosen]


def _pieces(spans: Sequence[Span], total: int) -> tuple[list[int], list[list[int]]]:
    borders = sorted({0, total, *(end for span in spans for part in span.keys for end in part)})
    number = {border: i for i, border in enumerate(borders)}
    chosen = [[i for a, b in span.keys for i in range(number[a], number[b])] for span in spans]
    return [b - a for a, b in pairwise(borders)], chosen


def ends(lengths: Sequence[int]) -> list[int]:
    """Running totals without a leading 0: lengths 3, 2, 4 -> 3, 5, 9 (`npu_fusion_attention`)."""
    assert lengths and min(lengths) > 0, f"segments need a token each, got {list(lengths)}"
    return list(accumulate(lengths))


def borders(lengths: Sequence[int]) -> list[int]:
    """Running totals with a leading 0: lengths 3, 2, 4 -> 0, 3, 5, 9 (flash attention)."""
    return [0, *ends(lengths)]


def keep_mask(n: int, m: int, window: int | None = None, device: torch.device | None = None) -> Tensor:
    """`[n, m]`, True where the query may see the key: causal, aligned at the end (`scaled_dot_product_attention`)."""
    before = torch.arange(m - n, m, device=device)[:, None] - torch.arange(m, device=device)[None]
    keep = before >= 0
    return keep if window is None else keep & (before < window)
