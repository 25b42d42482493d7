"""The order of an epoch: which pair stands at which place, as a pure function of (plan, epoch).

Pairs are drawn from groups, each with a number of places in the epoch: one group of all pairs with a place each, or,
with source weights, a group a source whose places are its share by largest remainder. A group with more places than
pairs is passed through several times, each pass shuffled anew; the places that do not fill a pass walk cyclically
through one fixed permutation, epoch after epoch, so that no pair of a group is ever seen two times more often than
another. Groups are interleaved at random, and a pair that would stand twice in one step changes places with a pair of
the nearest step that allows it.

Shuffles sort the raw 64-bit output of Philox (Salmon et al., 2011), seeded by SeedSequence: both streams are fixed by
numpy's compatibility policy, which `Generator.permutation` is not. Cost: a sort of the epoch, 4 s for 10 million
pairs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
import numpy.typing as npt

Integers = npt.NDArray[np.int64]

INTERLEAVING, PASS, SELECTION, REMAINDER = range(4)
"""What a shuffle is for; the first part of its key."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Group:
    """Pairs that share a number of places in each epoch; `members` int64[size] are indices of the plan's table."""

    name: str
    members: Integers
    places: int

    @property
    def repeats(self) -> int:
        """The most often that an epoch shows one of the pairs."""
        return -(-self.places // len(self.members))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Epoch:
    """`pairs`: int64[places], table indices in the order of training; `seen`: how often each was shown before."""

    pairs: Integers
    seen: Integers


def apportion(weights: Sequence[float], places: int) -> list[int]:
    """Whole numbers that sum to `places` in the proportion of `weights`, by largest remainder; the first wins a tie.

    Each is within one of its exact share.
    """
    total = sum(Fraction(weight) for weight in weights)
    exact = [Fraction(weight) / total * places for weight in weights]
    whole = [int(share) for share in exact]
    by_remainder = sorted(range(len(weights)), key=lambda i: (whole[i] - exact[i], i))
    for i in by_remainder[: places - sum(whole)]:
        whole[i] += 1
    return whole


def shuffled(n: int, entropy: int, *key: int) -> Integers:
    """A permutation of range(n), fixed by (entropy, key) for ever."""
    raw = np.random.Philox(np.random.SeedSequence(entropy, spawn_key=key)).random_raw(n)
    return np.argsort(raw, kind="stable").astype(np.int64, copy=False)


def draw_epoch(groups: Sequence[Group], epoch: int, *, entropy: int, pairs_per_step: int) -> Epoch:
    """The epoch's pairs, in order.

    A group that repeats pairs must do so less often than there are steps; `StepPlan` refuses others.
    """
    labels = np.repeat(np.arange(len(groups)), [group.places for group in groups])
    labels = labels[shuffled(len(labels), entropy, INTERLEAVING, epoch, 0, 0)] if len(groups) > 1 else labels
    pairs = np.empty(len(labels), np.int64)
    seen = np.empty(len(labels), np.int64)
    for g, group in enumerate(groups):
        places = labels == g
        pairs[places], seen[places] = _draw_group(group, g, epoch, entropy)
    if max(group.repeats for group in groups) == 1:
        return Epoch(pairs=pairs, seen=seen)
    moved = _keep_apart(pairs, pairs_per_step)
    return Epoch(pairs=pairs[moved], seen=seen[moved] + _earlier(pairs[moved]))


def _draw_group(group: Group, g: int, epoch: int, entropy: int) -> tuple[Integers, Integers]:
    """The group's pairs in this epoch, in order, and how often each was shown in earlier epochs."""
    size = len(group.members)
    passes, rest = divmod(group.places, size)
    drawn = [shuffled(size, entropy, PASS, epoch, g, k) for k in range(passes)]
    before = np.full(size, passes * epoch, np.int64)
    if rest:
        fixed = shuffled(size, entropy, SELECTION, 0, g, 0)
        rounds, partial = divmod(epoch * rest, size)
        before += rounds
        before[fixed[:partial]] += 1
        selection = fixed[(partial + np.arange(rest)) % size]
        drawn.append(selection[shuffled(rest, entropy, REMAINDER, epoch, g, 0)])
    chosen = np.concatenate(drawn)
    return group.members[chosen], before[chosen]


def _keep_apart(pairs: Integers, pairs_per_step: int) -> Integers:
    """Where each place of the epoch takes its pair from, so that no step holds a pair twice.

    A second copy of x in step a swaps with the first y of the nearest step b (onwards, then from the start) that holds
    no x while a holds no y. Each swap leaves one copy too many less.
    """
    source = np.arange(len(pairs))
    now = pairs.copy()
    bounds = [(start, min(start + pairs_per_step, len(now))) for start in range(0, len(now), pairs_per_step)]

    def swap(place: int) -> bool:
        a = place // pairs_per_step
        mine = now[slice(*bounds[a])]
        for b in (*range(a + 1, len(bounds)), *range(a)):
            theirs = now[slice(*bounds[b])]
            if (theirs == now[place]).any():
                continue
            foreign = np.flatnonzero(~np.isin(theirs, mine))
            if len(foreign):
                other = bounds[b][0] + int(foreign[0])
                now[[place, other]] = now[[other, place]]
                source[[place, other]] = source[[other, place]]
                return True
        return False

    while len(copies := _second_copies(now, pairs_per_step)):
        swapped = [swap(int(place)) for place in copies]
        assert any(swapped), f"{len(copies)} copies of pairs fit no step of {pairs_per_step}"
    return source


def _second_copies(pairs: Integers, pairs_per_step: int) -> Integers:
    step = np.arange(len(pairs)) // pairs_per_step
    by_step = np.lexsort((pairs, step))
    same = (np.diff(pairs[by_step]) == 0) & (np.diff(step[by_step]) == 0)
    return np.sort(by_step[1:][same])


def _earlier(pairs: Integers) -> Integers:
    """How often each pair stands earlier in the same epoch."""
    by_pair = np.argsort(pairs, kind="stable")
    first = np.flatnonzero(np.diff(pairs[by_pair], prepend=-1))
    counts = np.diff(first, append=len(pairs))
    earlier = np.empty(len(pairs), np.int64)
    earlier[by_pair] = np.arange(len(pairs)) - np.repeat(first, counts)
    return earlier
