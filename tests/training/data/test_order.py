"""Shares, shuffles and the order of an epoch."""

from __future__ import annotations

from collections import Counter
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import assume, event, given, settings
from hypothesis import strategies as st

from training.data.order import Group, apportion, draw_epoch, shuffled


@pytest.mark.parametrize(
    ("weights", "places", "expected"),
    [
        ([1, 1], 7, [4, 3]),  # a tie goes to the first
        ([0.7, 0.2, 0.1], 10, [7, 2, 1]),
        ([1, 1, 1], 100, [34, 33, 33]),
        ([3, 1], 6, [5, 1]),  # 4.5 and 1.5: a tie again
        ([5, 3, 1], 10, [6, 3, 1]),  # 5.56, 3.33, 1.11: the largest remainder
    ],
)
def test_shares_by_largest_remainder(weights: list[float], places: int, expected: list[int]) -> None:
    assert apportion(weights, places) == expected


@given(st.lists(st.floats(0.001, 1000), min_size=1, max_size=8), st.integers(0, 10**7))
def test_shares_are_hit_within_one(weights: list[float], places: int) -> None:
    shares = apportion(weights, places)
    assert sum(shares) == places
    total = sum(map(Fraction, weights))
    assert all(abs(got - Fraction(w) * places / total) < 1 for got, w in zip(shares, weights, strict=True))


def test_shuffles_are_these_for_ever() -> None:
    """Written down from numpy 2.4: a later one must not reorder the runs of an earlier one."""
    assert shuffled(8, 0, 0, 0).tolist() == [7, 6, 3, 2, 4, 1, 5, 0]
    assert shuffled(8, 2**127 + 5, 1, 3).tolist() == [1, 2, 5, 7, 4, 3, 6, 0]


def test_shuffles_are_permutations_that_differ_by_key() -> None:
    orders = [tuple(shuffled(50, 9, *key)) for key in ((0, 0), (0, 1), (1, 0))] + [tuple(shuffled(50, 8, 0, 0))]
    assert all(sorted(order) == list(range(50)) for order in orders)
    assert len(set(orders)) == 4


def test_places_of_a_shuffle_are_even() -> None:
    """Each of 4 items is first about as often as another, over 4000 keys."""
    first = Counter(int(shuffled(4, 1, key)[0]) for key in range(4000))
    assert all(900 < n < 1100 for n in first.values())


def groups_of(sizes: list[tuple[int, int]]) -> list[Group]:
    starts = np.cumsum([0, *(size for size, _ in sizes)])
    return [
        Group(name=str(g), members=np.arange(starts[g], starts[g] + size), places=places)
        for g, (size, places) in enumerate(sizes)
    ]


@settings(deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 12), st.integers(1, 40)), min_size=1, max_size=4),
    st.integers(1, 9),
    st.integers(0, 2**128 - 1),
)
def test_an_epoch_fills_its_places_evenly_and_never_shows_a_pair_twice_in_a_step(
    sizes: list[tuple[int, int]], pairs_per_step: int, entropy: int
) -> None:
    groups = groups_of(sizes)
    steps = -(-sum(group.places for group in groups) // pairs_per_step)
    assume(all(group.repeats <= max(1, steps - 1) for group in groups))
    event(f"repeats a pair: {any(group.repeats > 1 for group in groups)}")
    shown: Counter[int] = Counter()
    for epoch in range(4):
        drawn = draw_epoch(groups, epoch, entropy=entropy, pairs_per_step=pairs_per_step)
        for start in range(0, len(drawn.pairs), pairs_per_step):
            step = drawn.pairs[start : start + pairs_per_step].tolist()
            assert len(set(step)) == len(step)
        for pair, seen in zip(drawn.pairs.tolist(), drawn.seen.tolist(), strict=True):
            assert seen == shown[pair]
            shown[pair] += 1
        for group in groups:
            counts = [shown[pair] for pair in group.members.tolist()]
            assert sum(counts) == group.places * (epoch + 1)
            assert max(counts) - min(counts) <= 1


def test_small_sources_are_reshuffled_each_pass() -> None:
    """6 pairs with 30 places: the order of their first showings differs from that of their later ones."""
    drawn = draw_epoch(groups_of([(6, 30), (60, 60)]), 0, entropy=3, pairs_per_step=6)
    small = drawn.pairs[drawn.pairs < 6]
    seen = drawn.seen[drawn.pairs < 6]
    passes = [tuple(small[seen == k]) for k in range(5)]
    assert all(sorted(p) == list(range(6)) for p in passes)
    assert len(set(passes)) >= 4


def test_groups_are_interleaved() -> None:
    drawn = draw_epoch(groups_of([(500, 500), (500, 500)]), 0, entropy=1, pairs_per_step=50)
    shares = [(drawn.pairs[start : start + 50] < 500).mean() for start in range(0, 1000, 50)]
    assert all(0.2 < share < 0.8 for share in shares)
    assert len(set(shares)) > 3
