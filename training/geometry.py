"""A pack's layout as host integers: what stands where, who attends to whom, which row predicts which token.

A pack is one row of tokens that holds whole pairs. In the `shared` layout a pair stands as prompt | chosen | rejected:
the prompt is computed once, positions of the rejected side restart after the prompt, and its queries see the prompt's
keys, then their own. In the `concat` layout, for models that cannot share, it stands as prompt | chosen | prompt |
rejected. Both are lists of spans, a form that a variable-length kernel with separate query and key lengths, causal and
aligned at the end, computes exactly; sliding windows keep their meaning because a span's keys are in position order
without gaps. The tail up to the alignment multiple (or a length bucket) is one span of its own.

Everything here is made before a row is cut over ranks, and without torch: counters come from these integers, never
from a tensor's values. Cost: O(tokens) numpy work and two spans a pair.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from typing import Literal

import numpy as np
import numpy.typing as npt

Layout = Literal["shared", "concat"]
Integers = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PairShape:
    """Lengths of one pair in tokens, and which completion tokens are supervised.

    A mask is bool[completion]; None means that every token of that completion is supervised.
    """

    prompt: int
    chosen: int
    rejected: int
    chosen_mask: Mask | None = None
    rejected_mask: Mask | None = None

    def __post_init__(self) -> None:
        assert min(self.prompt, self.chosen, self.rejected) >= 1, f"prompt, chosen, rejected need a token each: {self}"
        for length, mask in ((self.chosen, self.chosen_mask), (self.rejected, self.rejected_mask)):
            assert mask is None or (len(mask) == length and mask.any()), (
                f"a mask is bool[completion], not empty: {self}"
            )

    def tokens(self, layout: Layout) -> int:
        """Tokens the pair takes in a pack: its prompt once (`shared`) or twice (`concat`)."""
        return (1 if layout == "shared" else 2) * self.prompt + self.chosen + self.rejected


@dataclass(frozen=True, slots=True)
class Span:
    """Query rows [q0, q1) attend to the ordered key rows `keys`, causal and aligned at the end.

    Query q1-1-j sees all keys but the last j. The last q1-q0 keys are the queries themselves, and a key's place in the
    list is its position less a constant.
    """

    q0: int
    q1: int
    keys: tuple[tuple[int, int], ...]

    @property
    def n(self) -> int:
        """Number of queries."""
        return self.q1 - self.q0

    @property
    def m(self) -> int:
        """Number of keys."""
        return sum(b - a for a, b in self.keys)

    def cut(self, a: int, b: int, window: int | None = None) -> Span:
        """The part whose queries lie in rows [a, b), which must meet the span.

        Queries lost at the end take as many keys with them; queries lost at the front take none, but with a sliding
        window the keys that the first remaining query no longer sees go.
        """
        q0, q1 = max(self.q0, a), min(self.q1, b)
        assert q0 < q1, f"rows [{a}, {b}) do not meet {self}"
        end = self.m - (self.q1 - q1)
        start = 0 if window is None else max(0, end - (q1 - q0) - window + 1)
        return Span(q0, q1, _slice(self.keys, start, end))

    def cost(self, window: int | None = None) -> int:
        """Number of (query, key) pairs that are computed."""
        first, last = self.m - self.n + 1, self.m  # keys seen by the first and the last query
        full = last if window is None else max(first - 1, min(window, last))  # queries that see `first`..`full` keys
        growing = (first + full) * (full - first + 1) // 2
        return growing + (last - full) * (window or 0)


def _slice(ranges: Iterable[tuple[int, int]], start: int, end: int) -> tuple[tuple[int, int], ...]:
    kept: list[tuple[int, int]] = []
    offset = 0
    for a, b in ranges:
        low, high = a + max(0, start - offset), min(b, a + end - offset)
        if low < high:
            kept.append((low, high))
        offset += b - a
    return tuple(kept)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Pack:
    """One row of whole pairs and its padding.

    `position`: int64[total], each token's position in its document. `spans` tile [0, total) in order; the tail padding,
    if there is any, is the last one. Score k says that the hidden row `score_row[k]` predicts the token at row
    `score_target[k]`, and that its log-probability belongs to side `score_side[k]`: 2i chosen, 2i+1 rejected of pair i.
    `document_lengths`: int64[2 * pairs] by side, prompt included; `prompt_tokens`: int64[pairs].
    """

    layout: Layout
    total: int
    used: int
    position: Integers
    spans: tuple[Span, ...]
    score_row: Integers
    score_target: Integers
    score_side: Integers
    document_lengths: Integers
    prompt_tokens: Integers

    @property
    def pairs(self) -> int:
        """Pairs in the pack; 0 in a row that only keeps other ranks company."""
        return len(self.prompt_tokens)


def row_length(used: int, *, multiple: int, buckets: Sequence[int] = ()) -> int:
    """Length that a row of `used` tokens is padded to: the smallest bucket that holds it, else the next multiple.

    An empty row is one multiple. Buckets are multiples of `multiple`.
    """
    fitting = [bucket for bucket in buckets if bucket >= used]
    return min(fitting) if used and fitting else max(1, -(-used // multiple)) * multiple


def lay_out(
    shapes: Sequence[PairShape], *, layout: Layout = "shared", multiple: int = 1, length: int | None = None
) -> Pack:
    """Lay pairs in one row, in the order given, padded at its tail to `length`, else to the next multiple.

    No shapes make an empty pack of one multiple (or of `length`), all padding. Targets are fixed here, before any
    sharding: a supervised token is predicted by the token before it in its own document, so that the last prompt row of
    the `shared` layout predicts the first token of both sides.
    """
    used = sum(shape.tokens(layout) for shape in shapes)
    total = row_length(used, multiple=multiple) if length is None else length
    assert total >= used and total % multiple == 0, f"{used} tokens in a row of {total}, a multiple of {multiple}"
    position: list[Integers] = []
    spans: list[Span] = []
    scores: list[tuple[Integers, Integers, int]] = []
    start = 0
    for shape in shapes:
        for completion, mask in ((shape.chosen, shape.chosen_mask), (shape.rejected, shape.rejected_mask)):
            shares = layout == "shared" and len(scores) % 2 == 1
            prompt = spans[-1].q0 if shares else start
            first = start if shares else start + shape.prompt  # row of the completion's first token
            end = first + completion
            prompt_keys = ((prompt, prompt + shape.prompt),) if shares else ()
            spans.append(Span(start, end, (*prompt_keys, (start, end))))
            position.append(np.arange(shape.prompt if shares else 0, shape.prompt + completion))
            supervised = np.arange(completion) if mask is None else np.flatnonzero(mask)
            target = first + supervised
            row = np.where(supervised == 0, prompt + shape.prompt - 1, target - 1)
            scores.append((row, target, len(scores)))
            start = end
    if total > used:
        spans.append(Span(used, total, ((used, total),)))
        position.append(np.arange(total - used))
    return Pack(
        layout=layout,
        total=total,
        used=used,
        position=_join(position),
        spans=tuple(spans),
        score_row=_join(row for row, _, _ in scores),
        score_target=_join(target for _, target, _ in scores),
        score_side=_join(np.full(len(target), side) for _, target, side in scores),
        document_lengths=np.array([s.prompt + n for s in shapes for n in (s.chosen, s.rejected)], np.int64),
        prompt_tokens=np.array([s.prompt for s in shapes], np.int64),
    )


def _join(arrays: Iterable[Integers]) -> Integers:
    return np.concatenate([np.empty(0, np.int64), *arrays], dtype=np.int64)


def pack_ids(pack: Pack, pairs: Sequence[tuple[Sequence[int], Sequence[int], Sequence[int]]], pad_id: int) -> Integers:
    """The pack's tokens, int64[total]: (prompt, chosen, rejected) ids of its pairs in order, then `pad_id`."""
    assert len(pairs) == pack.pairs, f"{len(pairs)} pairs of ids for a pack of {pack.pairs}"
    parts: list[Sequence[int]] = []
    for i, (prompt, chosen, rejected) in enumerate(pairs):
        found = (len(prompt), len(prompt) + len(chosen), len(prompt) + len(rejected))
        laid = (int(pack.prompt_tokens[i]), *(int(n) for n in pack.document_lengths[2 * i : 2 * i + 2]))
        assert found == laid, f"pair {i}: prompt and documents of {found} tokens, laid out for {laid}"
        parts += [prompt, chosen, rejected] if pack.layout == "shared" else [prompt, chosen, prompt, rejected]
    ids = np.full(pack.total, pad_id, np.int64)
    if parts:
        ids[: pack.used] = np.concatenate(parts)
    return ids


@dataclass(frozen=True, slots=True, kw_only=True)
class Counters:
    """Exact token counts of packs; those of a step are the sum over all its packs on all ranks."""

    window_tokens: int = 0
    """packs * pack_tokens: the room that was there."""
    physical_tokens: int = 0
    """Rows as computed, padding and empty packs included."""
    aligned_tokens: int = 0
    """Physical less the known tail padding."""
    source_tokens: int = 0
    """Tokens of pairs as laid out: a shared prompt once, twice in `concat`."""
    logical_tokens: int = 0
    """The same pairs without sharing: 2 * prompt + chosen + rejected."""
    loss_tokens: int = 0
    """Supervised targets."""
    chosen_loss_tokens: int = 0
    rejected_loss_tokens: int = 0
    documents: int = 0
    pairs: int = 0
    packs: int = 0
    empty_packs: int = 0
    max_document_tokens: int = 0
    sum_document_tokens_squared: int = 0

    def __add__(self, other: Counters) -> Counters:
        """Sums; of `max_document_tokens` the larger."""
        mine, theirs = (tuple(getattr(c, f.name) for f in fields(Counters)) for c in (self, other))
        joined = {f.name: a + b for f, a, b in zip(fields(Counters), mine, theirs, strict=True)}
        joined["max_document_tokens"] = max(self.max_document_tokens, other.max_document_tokens)
        return Counters(**joined)

    def violations(self) -> list[str]:
        """Invariants that these numbers break, as sentences; empty when they are sound."""
        chain = ("loss_tokens", "source_tokens", "aligned_tokens", "physical_tokens")
        rising = [("source_tokens", "logical_tokens"), ("empty_packs", "packs"), *zip(chain, chain[1:], strict=False)]
        broken = [
            f"{f.name} = {getattr(self, f.name)} is negative" for f in fields(Counters) if getattr(self, f.name) < 0
        ]
        broken += [
            f"{low} = {getattr(self, low)} is more than {high} = {getattr(self, high)}"
            for low, high in rising
            if getattr(self, low) > getattr(self, high)
        ]
        if self.loss_tokens != self.chosen_loss_tokens + self.rejected_loss_tokens:
            broken.append(
                f"loss_tokens = {self.loss_tokens} is not chosen_loss_tokens + rejected_loss_tokens = "
                f"{self.chosen_loss_tokens} + {self.rejected_loss_tokens}"
            )
        if self.documents != 2 * self.pairs:
            broken.append(f"documents = {self.documents} is not 2 * pairs = {2 * self.pairs}")
        return broken


def count(pack: Pack, *, pack_tokens: int) -> Counters:
    """The counters of one pack that was given `pack_tokens` of room."""
    lengths = [int(n) for n in pack.document_lengths]  # Python integers: squares cannot overflow
    rejected = int((pack.score_side % 2).sum())
    return Counters(
        window_tokens=pack_tokens,
        physical_tokens=pack.total,
        aligned_tokens=pack.used,
        source_tokens=pack.used,
        logical_tokens=sum(lengths),
        loss_tokens=len(pack.score_side),
        chosen_loss_tokens=len(pack.score_side) - rejected,
        rejected_loss_tokens=rejected,
        documents=len(lengths),
        pairs=pack.pairs,
        packs=1,
        empty_packs=int(pack.pairs == 0),
        max_document_tokens=max(lengths, default=0),
        sum_document_tokens_squared=sum(n * n for n in lengths),
    )
