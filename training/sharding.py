"""A pack cut over the ranks that share it, as host integers: context parallelism times Ulysses.

Context parallelism cuts the padded row into 2 * cp equal chunks and gives each of its ranks two, heavy with light by
attention cost: a table, not a formula, because with packs the cost of a chunk depends on where documents begin (zig-zag
is the special case of one long document). Spans are cut to the chunks, and their keys named by where they stand once
keys and values are all-gathered, so that a prompt that lies in another rank's chunk needs no case of its own. Inside a
context rank, Ulysses splits its tokens evenly and exchanges sequence for heads around attention. With cp = 1 the row is
one chunk.

The rows that meet the language-model head can all lie on one rank. `deal_scores` says who sends which of them to whom
so that every rank scores the same number, one more or less; every host knows all sizes without asking.

Ranks of a group are numbered context-major: `cp_rank * ulysses + ulysses_rank`. Cost: spans times chunks.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from training.geometry import Integers, Pack, Span


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """Which chunks of a row of `total` tokens each context rank holds: `chunks[cp rank]`, rising."""

    total: int
    chunks: tuple[tuple[int, ...], ...]

    @property
    def width(self) -> int:
        """Tokens of a chunk."""
        return self.total // sum(len(mine) for mine in self.chunks)

    def gathered(self, rows: Integers) -> Integers:
        """Where rows stand once all ranks' tokens are gathered, context-major."""
        place_of_chunk = np.argsort(np.ravel(self.chunks))
        return place_of_chunk[rows // self.width] * self.width + rows % self.width

    def rows(self) -> Integers:
        """int64[total]: the row at each gathered place; the inverse of `gathered`."""
        return (np.ravel(self.chunks)[:, None] * self.width + np.arange(self.width)).ravel()

    def pieces(self, cp_rank: int) -> list[tuple[int, int]]:
        """Row ranges of a rank, rising; chunks that touch are one range."""
        pieces: list[tuple[int, int]] = []
        for chunk in self.chunks[cp_rank]:
            start, end = chunk * self.width, (chunk + 1) * self.width
            if pieces and pieces[-1][1] == start:
                start = pieces.pop()[0]
            pieces.append((start, end))
        return pieces


def place(pack: Pack, *, cp: int, ulysses: int = 1) -> Placement:
    """Balanced placement: the dearest chunk goes with the cheapest, the second with the second cheapest, and so on.

    Costs are those of layers that see the whole document; layers with a sliding window share the same placement.
    """
    multiple = ulysses if cp == 1 else 2 * cp * ulysses
    assert pack.total % multiple == 0, f"a row of {pack.total} tokens over cp {cp}, ulysses {ulysses}: not a multiple"
    if cp == 1:
        return Placement(total=pack.total, chunks=((0,),))
    width = pack.total // (2 * cp)
    costs = [
        sum(span.cost() for span in _cut(pack.spans, [(start, start + width)])) for start in range(0, pack.total, width)
    ]
    dearest = sorted(range(2 * cp), key=lambda chunk: -costs[chunk])
    couples = zip(dearest[:cp], reversed(dearest[cp:]), strict=True)
    return Placement(total=pack.total, chunks=tuple((min(couple), max(couple)) for couple in couples))


def _cut(spans: tuple[Span, ...], pieces: list[tuple[int, int]]) -> tuple[Span, ...]:
    return tuple(span.cut(a, b) for a, b in pieces for span in spans if span.q0 < b and span.q1 > a)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Shard:
    """What one rank of a group computes.

    `token`: int64[total / (cp * ulysses)], rows whose ids and positions it takes. `spans` are those of its context rank
    inside attention, once Ulysses has joined that rank's tokens: their queries tile [0, total / cp), their keys are
    ranges of the gathered row, still in position order.
    """

    token: Integers
    spans: tuple[Span, ...]


def shard(pack: Pack, placement: Placement, *, cp_rank: int = 0, ulysses_rank: int = 0, ulysses: int = 1) -> Shard:
    """The share of one rank."""
    size = pack.total // (len(placement.chunks) * ulysses)
    first = (cp_rank * ulysses + ulysses_rank) * size
    spans = pack.spans if len(placement.chunks) == 1 else _local(pack.spans, placement, cp_rank)
    return Shard(token=placement.rows()[first : first + size], spans=spans)


def _local(spans: tuple[Span, ...], placement: Placement, cp_rank: int) -> tuple[Span, ...]:
    local: list[Span] = []
    start = 0
    for span in _cut(spans, placement.pieces(cp_rank)):
        local.append(Span(start, start + span.n, tuple(_moved(span.keys, placement))))
        start += span.n
    return tuple(local)


def _moved(ranges: tuple[tuple[int, int], ...], placement: Placement) -> Iterator[tuple[int, int]]:
    """Row ranges as ranges of the gathered row, cut where chunks end."""
    width = placement.width
    for a, b in ranges:
        for chunk in range(a // width, -(-b // width)):
            first, last = max(a, chunk * width), min(b, (chunk + 1) * width)
            moved = int(placement.gathered(np.array([first]))[0])
            yield moved, moved + last - first


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ScoreShare:
    """One rank's part in scoring: hidden rows it sends, and what it scores of those it receives.

    `send`: int64, local hidden rows in the order of their receivers; `send_counts`, `receive_counts`: one int a rank,
    the sizes of an all-to-all. `score`: int64, which of the pack's scores each received row is, in order of arrival.
    """

    send: Integers
    send_counts: tuple[int, ...]
    receive_counts: tuple[int, ...]
    score: Integers


def deal_scores(pack: Pack, placement: Placement, *, ulysses: int = 1) -> tuple[ScoreShare, ...]:
    """Every rank's share of the pack's scores; shares differ by at most one, and a rank keeps its own as far as it may.

    A rank that has more than its share sends the surplus to those that have less. A hidden row that predicts the first
    token of both sides is two scores.
    """
    ranks = len(placement.chunks) * ulysses
    size = pack.total // ranks
    gathered = placement.gathered(pack.score_row)
    order = np.argsort(gathered, kind="stable")  # by owner, then by place on it
    owner, local = gathered[order] // size, gathered[order] % size
    held = np.bincount(owner, minlength=ranks)
    quota = len(order) // ranks + (np.arange(ranks) < len(order) % ranks)
    nth = np.arange(len(order)) - np.repeat(np.cumsum(held) - held, held)  # counts an owner's scores
    scorer = owner.copy()
    scorer[nth >= quota[owner]] = np.repeat(np.arange(ranks), np.maximum(quota - held, 0))
    shares: list[ScoreShare] = []
    for rank in range(ranks):
        sent = np.flatnonzero(owner == rank)
        sent = sent[np.argsort(scorer[sent], kind="stable")]
        received = np.flatnonzero(scorer == rank)
        shares.append(
            ScoreShare(
                send=local[sent],
                send_counts=tuple(np.bincount(scorer[sent], minlength=ranks).tolist()),
                receive_counts=tuple(np.bincount(owner[received], minlength=ranks).tolist()),
                score=order[received],
            )
        )
    return tuple(shares)
