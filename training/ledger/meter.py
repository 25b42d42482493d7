"""The meter for our own packs: exact counters of a step and of its sources, from the geometry alone.

A rank measures each pack it computes on the host, from the same integers the kernels were given, never from a tensor's
values; over the ranks of a step the readings are gathered once and added. What cannot be known is unknown, with a
reason, for the whole step: one rank's missing reading makes the step's counters None, and `ranks_reported` less than
`ranks_expected`. The meter never raises, never stops training and never changes what it is given: a broken invariant,
or a fault in the counting itself, is a warning in the log and a reason in the record. Cost: 2 µs a pair.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Generic, Protocol, Self, TypeVar

import numpy as np

from training.geometry import Counters, Pack, count
from training.ledger.flops import ModelShape, pair_flops

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Unknown:
    """A reading that cannot be taken, and why."""

    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceCounts:
    """What one source's pairs count; window, physical tokens and packs belong to the step, not to a source."""

    pairs: int = 0
    documents: int = 0
    source_tokens: int = 0
    logical_tokens: int = 0
    loss_tokens: int = 0
    chosen_loss_tokens: int = 0
    rejected_loss_tokens: int = 0
    flops: int | None = 0
    """None where the model's FLOPs are not known."""

    def __add__(self, other: SourceCounts) -> SourceCounts:
        """Sums; unknown FLOPs stay unknown."""
        return SourceCounts(
            **{f.name: _sum(getattr(self, f.name), getattr(other, f.name)) for f in fields(SourceCounts)}  # pyright: ignore[reportArgumentType]
        )


def _sum(a: int | None, b: int | None) -> int | None:
    return None if a is None or b is None else a + b


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """The counters of some packs, and what each source has in them.

    The empty reading is what a rank reports whose pack another rank of its sequence-parallel group has counted.
    """

    counters: Counters = field(default_factory=Counters)
    sources: Mapping[str, SourceCounts] = field(default_factory=dict[str, SourceCounts])
    flops: int | None = 0

    def __add__(self, other: Reading) -> Reading:
        """Sums by counter and by source."""
        sources = dict(self.sources)
        for name, counts in other.sources.items():
            sources[name] = sources.get(name, SourceCounts()) + counts
        return Reading(counters=self.counters + other.counters, sources=sources, flops=_sum(self.flops, other.flops))

    def violations(self) -> list[str]:
        """Invariants of the counters that are broken, and sums over sources that are not the step's."""
        broken = self.counters.violations()
        for name in (f.name for f in fields(SourceCounts) if f.name != "flops"):
            parts, whole = sum(getattr(s, name) for s in self.sources.values()), getattr(self.counters, name)
            if parts != whole:
                broken.append(f"{name} of the sources add up to {parts}, the step has {whole}")
        return broken


def measure(
    packs: Sequence[Pack], sources: Sequence[Sequence[str]], *, pack_tokens: int, model: ModelShape | None = None
) -> Reading | Unknown:
    """Count the packs a rank computes in a step; `sources[i][j]` is the source of pair j in pack i.

    Never raises: a fault or a broken invariant is logged and becomes `Unknown`.
    """
    try:
        return checked(sum((_measured(p, s, pack_tokens, model) for p, s in _zip(packs, sources)), Reading()))
    except Exception as error:  # training must outlive any fault of its meter
        log.warning("the meter failed, this step's counters are unknown", exc_info=True)
        return Unknown(f"the meter failed: {type(error).__name__}: {error}")


def _zip(packs: Sequence[Pack], sources: Sequence[Sequence[str]]) -> Iterable[tuple[Pack, Sequence[str]]]:
    return zip(packs, sources, strict=True)


def _measured(pack: Pack, sources: Sequence[str], pack_tokens: int, model: ModelShape | None) -> Reading:
    supervised = np.bincount(pack.score_side, minlength=2 * pack.pairs).reshape(-1, 2).tolist()
    documents = pack.document_lengths.reshape(-1, 2).tolist()
    by_source: dict[str, SourceCounts] = {}
    for name, prompt, (chosen, rejected), (chosen_loss, rejected_loss) in zip(
        sources, pack.prompt_tokens.tolist(), documents, supervised, strict=True
    ):
        counts = SourceCounts(
            pairs=1,
            documents=2,
            source_tokens=chosen + rejected - (prompt if pack.layout == "shared" else 0),
            logical_tokens=chosen + rejected,
            loss_tokens=chosen_loss + rejected_loss,
            chosen_loss_tokens=chosen_loss,
            rejected_loss_tokens=rejected_loss,
            flops=model
            and pair_flops(
                model,
                prompt=prompt,
                chosen=chosen - prompt,
                rejected=rejected - prompt,
                supervised=chosen_loss + rejected_loss,
            ),
        )
        by_source[name] = by_source.get(name, SourceCounts()) + counts
    flops = None if model is None else sum(counts.flops or 0 for counts in by_source.values())
    return Reading(counters=count(pack, pack_tokens=pack_tokens), sources=by_source, flops=flops)


class Measured(Protocol):
    """A reading of either meter."""

    def __add__(self, other: Self, /) -> Self: ...

    def violations(self) -> list[str]:
        """Invariants that are broken, as sentences."""
        ...


R = TypeVar("R", bound=Measured)


def checked(reading: R) -> R | Unknown:
    """The reading, or `Unknown` with a warning when it breaks an invariant."""
    broken = reading.violations()
    if not broken:
        return reading
    log.warning("counters break an invariant and are not recorded: %s", "; ".join(broken))
    return Unknown("broken invariant: " + "; ".join(broken))


@dataclass(frozen=True, slots=True, kw_only=True)
class Joined(Generic[R]):
    """A step's reading over all ranks: everything is known, or nothing is."""

    total: R | None
    ranks_expected: int
    ranks_reported: int
    unknown_reason: str | None


def add(readings: Sequence[R | Unknown]) -> R | Unknown:
    """A rank's readings of its microbatches as one; unknown when any of them is."""
    known: list[R] = []
    for reading in readings:
        if isinstance(reading, Unknown):
            return reading
        known.append(reading)
    if not known:
        return Unknown("no microbatch was measured")
    total = known[0]
    for reading in known[1:]:
        total = total + reading
    return total


def join(per_rank: Sequence[R | Unknown]) -> Joined[R]:
    """The readings of all ranks as the step's; one rank that does not know makes the step unknown for all."""
    reasons = [f"rank {i}: {r.reason}" for i, r in enumerate(per_rank) if isinstance(r, Unknown)]
    total = add(per_rank) if not reasons else None
    return Joined(
        total=None if isinstance(total, Unknown) else total,
        ranks_expected=len(per_rank),
        ranks_reported=len(per_rank) - len(reasons),
        unknown_reason="; ".join(reasons) or None,
    )


def over_ranks(reading: R | Unknown, gather: Callable[[R | Unknown], Sequence[R | Unknown]]) -> Joined[R]:
    """Join a step's readings with exactly one collective on every rank, whether or not this rank knows its own.

    `gather` returns the readings of all ranks in order, as an all-gather of objects on the host does.
    """
    return join(gather(reading))
