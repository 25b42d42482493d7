"""The meter for packed rows that others made: cu_seqlens and labels, as trainers pass them to a varlen kernel.

It gives the counters that such a row determines, and `shifted_label_tokens`, the number of labels that are not ignored
after ONE left shift of the whole row. That number is generic, not a denominator: a shift over the row also scores the
first token of each document on the last of the one before, where a shift inside each document (`loss_tokens`) does not.

Where the row does not say enough, the answer is the reason why, never a guess:
- segments of one token at its end without a recorded tail length: documents and padding look the same;
- a list of boundaries that is local to a rank of a context-parallel group: scaling it by the degree would be a guess;
- malformed metadata: boundaries that do not rise from 0, labels of another length or none, a tail at no boundary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from training.ledger.meter import Unknown, checked

IGNORED = -100


@dataclass(frozen=True, slots=True, kw_only=True)
class ForeignReading:
    """What foreign rows count. `documents` are their segments, the tail not included."""

    window_tokens: int
    physical_tokens: int
    aligned_tokens: int
    source_tokens: int
    loss_tokens: int
    shifted_label_tokens: int | None
    """None for an objective that does not shift."""
    documents: int
    max_document_tokens: int
    sum_document_tokens_squared: int

    def __add__(self, other: ForeignReading) -> ForeignReading:
        """Sums; of `max_document_tokens` the larger; an unknown generic count stays unknown."""
        mine, theirs = self.shifted_label_tokens, other.shifted_label_tokens
        return ForeignReading(
            window_tokens=self.window_tokens + other.window_tokens,
            physical_tokens=self.physical_tokens + other.physical_tokens,
            aligned_tokens=self.aligned_tokens + other.aligned_tokens,
            source_tokens=self.source_tokens + other.source_tokens,
            loss_tokens=self.loss_tokens + other.loss_tokens,
            shifted_label_tokens=None if mine is None or theirs is None else mine + theirs,
            documents=self.documents + other.documents,
            max_document_tokens=max(self.max_document_tokens, other.max_document_tokens),
            sum_document_tokens_squared=self.sum_document_tokens_squared + other.sum_document_tokens_squared,
        )

    def violations(self) -> list[str]:
        """Broken links of 0 <= loss <= source <= aligned <= physical."""
        chain = [
            ("0", 0),
            ("loss_tokens", self.loss_tokens),
            ("source_tokens", self.source_tokens),
            ("aligned_tokens", self.aligned_tokens),
            ("physical_tokens", self.physical_tokens),
        ]
        return [
            f"{low} = {a} is more than {high} = {b}"
            for (low, a), (high, b) in zip(chain, chain[1:], strict=False)
            if a > b
        ]


@dataclass(frozen=True, slots=True, kw_only=True)
class Segments:
    """Lengths of a row's documents, and of its padding tail."""

    documents: tuple[int, ...]
    tail: int


def foreign_batch(
    cu_seqlens: Sequence[int] | None,
    labels: Sequence[int] | None,
    *,
    pack_tokens: int,
    tail: int | None = None,
    position_ids: Sequence[int] | None = None,
    cp: int = 1,
    ulysses: int = 1,
    scope: Literal["global", "rank"] = "global",
    objective: Literal["shifted", "unshifted"] = "shifted",
) -> ForeignReading | Unknown:
    """Count one packed row as it is before it is cut over ranks; sequences may be lists, arrays or host tensors.

    `cu_seqlens` are its boundaries from 0 to its length; without them a document begins wherever `position_ids` is 0.
    `labels` has a label a token, not shifted, -100 where ignored; those of the tail may be left out. `tail` is the
    number of padding tokens at the row's end, None when it was not recorded. With context parallelism each document is
    padded to a multiple of 2 * cp * ulysses, with Ulysses alone the row to a multiple of `ulysses`. `scope` says
    whether the boundaries are those of the whole row or of one rank. An `unshifted` objective (classification) has
    each label at its own token.
    """
    if scope == "rank":
        return Unknown("boundaries are local to a rank; the row's own are needed, a degree does not give them back")
    if labels is None:
        return Unknown("the row has no labels")
    try:
        given = [int(label) for label in labels]
        boundaries = _boundaries(position_ids) if cu_seqlens is None else [int(place) for place in cu_seqlens]
    except (TypeError, ValueError) as error:
        return Unknown(f"labels or boundaries are not integers: {error}")
    found = segments(boundaries, tail)
    if isinstance(found, Unknown):
        return found
    used, total = sum(found.documents), sum(found.documents) + found.tail
    if len(given) not in (used, total) or any(label != IGNORED for label in given[used:]):
        return Unknown(
            f"{len(given)} labels do not belong to {used} tokens of documents and an unlabelled {found.tail}"
        )
    return checked(_counted(found, given[:used], pack_tokens, cp, ulysses, objective))


def _counted(
    found: Segments, labels: list[int], pack_tokens: int, cp: int, ulysses: int, objective: str
) -> ForeignReading:
    multiple = ulysses if cp == 1 else 2 * cp * ulysses
    aligned = len(labels) if cp == 1 else sum(_round_up(n, multiple) for n in found.documents)
    shifts = objective == "shifted"
    return ForeignReading(
        window_tokens=pack_tokens,
        physical_tokens=_round_up(aligned + found.tail, multiple),
        aligned_tokens=aligned,
        source_tokens=len(labels),
        loss_tokens=_scored(shift_documents(labels, found.documents) if shifts else labels),
        shifted_label_tokens=_scored(shift_row(labels)) if shifts else None,
        documents=len(found.documents),
        max_document_tokens=max(found.documents, default=0),
        sum_document_tokens_squared=sum(n * n for n in found.documents),
    )


def segments(boundaries: Sequence[int], tail: int | None) -> Segments | Unknown:
    """Documents and tail of a row; padding written as many segments is one tail."""
    lengths = [b - a for a, b in zip(boundaries, boundaries[1:], strict=False)]
    if not lengths or boundaries[0] != 0 or min(lengths) < 1:
        return Unknown(f"boundaries {list(boundaries)} do not rise from 0")
    if tail is None and lengths[-1] == 1:
        return Unknown("segments of one token at the row's end and no recorded tail length: documents or padding?")
    end = boundaries[-1] - (tail or 0)
    if (tail or 0) < 0 or end not in boundaries:
        return Unknown(f"a tail of {tail} tokens does not begin at a boundary of {list(boundaries)}")
    documents = lengths[: list(boundaries).index(end)]
    return Segments(documents=tuple(documents), tail=boundaries[-1] - end)


def _boundaries(position_ids: Sequence[int] | None) -> list[int]:
    positions = [] if position_ids is None else [int(position) for position in position_ids]
    return [*(i for i, position in enumerate(positions) if position == 0), len(positions)]


def shift_row(labels: Sequence[int]) -> list[int]:
    """One left shift of the whole row: each token gets its right neighbour's label, the last none."""
    return [*labels[1:], IGNORED]


def shift_documents(labels: Sequence[int], documents: Sequence[int]) -> list[int]:
    """A left shift inside each document, whose last token gets none."""
    shifted: list[int] = []
    for length in documents:
        start = len(shifted)
        shifted += shift_row(labels[start : start + length])
    return shifted


def _scored(labels: Sequence[int]) -> int:
    return sum(label != IGNORED for label in labels)


def _round_up(tokens: int, multiple: int) -> int:
    return -(-tokens // multiple) * multiple
