"""Every rank's share of a pack, put together again, against a mask and a list of scores written from the definition."""

from __future__ import annotations

import random

import numpy as np
import pytest

from training.geometry import Layout, Pack, PairShape, lay_out
from training.sharding import Placement, deal_scores, place, shard

ROWS = [(1, 1), (1, 2), (1, 4), (2, 1), (2, 2), (3, 1), (4, 2), (8, 1)]


def allowed(lengths: list[tuple[int, int, int]], layout: Layout, total: int, window: int | None) -> np.ndarray:
    """bool[total, total]: which row sees which, token by token from what a document is."""
    where: list[tuple[object, int]] = []  # (segment, position) of each row
    sees: dict[object, set[object]] = {}
    for i, (p, c, r) in enumerate(lengths):
        prompts = {"shared": ("prompt", "prompt"), "concat": ("chosen prompt", "rejected prompt")}[layout]
        for side, prompt, n in (("chosen", prompts[0], c), ("rejected", prompts[1], r)):
            if (i, prompt) not in sees:
                where += [((i, prompt), t) for t in range(p)]
                sees[i, prompt] = {(i, prompt)}
            where += [((i, side), p + t) for t in range(n)]
            sees[i, side] = {(i, prompt), (i, side)}
    where += [("tail", t) for t in range(total - len(where))]
    sees["tail"] = {"tail"}
    return np.array([[k in sees[q] and 0 <= a - b < (window or total) for k, b in where] for q, a in where], dtype=bool)


def seen(pack: Pack, placement: Placement, ulysses: int, window: int | None, *, trim: bool) -> np.ndarray:
    """int[total, total]: how often each (query, key) pair is computed, as a kernel reads the shards."""
    count = np.zeros((pack.total, pack.total), int)
    gathered = np.full(pack.total, -1)
    cp = len(placement.chunks)
    for c in range(cp):
        shares = [shard(pack, placement, cp_rank=c, ulysses_rank=u, ulysses=ulysses) for u in range(ulysses)]
        queries = np.concatenate([share.token for share in shares])
        gathered[c * len(queries) : (c + 1) * len(queries)] = queries
    for c in range(cp):
        share = shard(pack, placement, cp_rank=c, ulysses=ulysses)
        queries = gathered[c * pack.total // cp : (c + 1) * pack.total // cp]
        assert [s.q0 for s in share.spans] == [0, *(s.q1 for s in share.spans[:-1])]
        assert share.spans[-1].q1 == len(queries)
        for span in share.spans:
            seen = span.cut(span.q0, span.q1, window) if trim else span
            keys = np.concatenate([gathered[a:b] for a, b in seen.keys])
            assert seen.n <= seen.m == len(keys)
            age = np.arange(seen.n)[:, None] + seen.m - seen.n - np.arange(seen.m)[None]
            allowed = (age >= 0) & (age < (window or pack.total))
            count[np.ix_(queries[seen.q0 : seen.q1], keys)] += allowed
    assert sorted(gathered) == list(range(pack.total))
    return count


def scored(pack: Pack, placement: Placement, ulysses: int) -> tuple[list[tuple[int, int, int]], list[int]]:
    """(hidden row, target row, side) of every score after the exchange, and how many each rank has."""
    shares = deal_scores(pack, placement, ulysses=ulysses)
    size = pack.total // len(shares)
    rows = placement.rows()
    got: list[tuple[int, int, int]] = []
    for rank, share in enumerate(shares):
        arrived: list[int] = []
        for sender, theirs in enumerate(shares):
            start = sum(theirs.send_counts[:rank])
            sent = theirs.send[start : start + theirs.send_counts[rank]]
            assert len(sent) == share.receive_counts[sender]
            assert ((sent >= 0) & (sent < size)).all()
            arrived += rows[sender * size + sent].tolist()
        scores = share.score
        got += list(zip(arrived, pack.score_target[scores].tolist(), pack.score_side[scores].tolist(), strict=True))
    return got, [len(share.score) for share in shares]


@pytest.mark.parametrize("seed", range(120))
def test_every_allowed_pair_once_and_every_score_once(seed: int) -> None:
    rng = random.Random(seed)
    lengths = [tuple(rng.choice([1, 1, 2, 3, rng.randint(1, 14)]) for _ in range(3)) for _ in range(rng.randint(0, 5))]
    layout: Layout = rng.choice(["shared", "concat"])
    cp, ulysses = rng.choice(ROWS)
    window = rng.choice([None, None, 1, 2, 6, 17])
    masks = [[np.array([rng.random() < 0.6 for _ in range(n - 1)] + [True]) for n in pair[1:]] for pair in lengths]
    shapes = [
        PairShape(prompt=p, chosen=c, rejected=r, chosen_mask=m[0], rejected_mask=m[1])
        for (p, c, r), m in zip(lengths, masks, strict=True)
    ]
    pack = lay_out(shapes, layout=layout, multiple=ulysses if cp == 1 else 2 * cp * ulysses)
    if cp > 1 and rng.random() < 0.5:  # any table of two chunks a rank is exact, not only the balanced one
        chunks = rng.sample(range(2 * cp), 2 * cp)
        table = tuple(tuple(sorted(chunks[2 * c : 2 * c + 2])) for c in range(cp))
        placement = Placement(total=pack.total, chunks=table)
    else:
        placement = place(pack, cp=cp, ulysses=ulysses)

    count = seen(pack, placement, ulysses, window, trim=rng.random() < 0.5)
    np.testing.assert_array_equal(count, allowed(lengths, layout, pack.total, window))
    got, sizes = scored(pack, placement, ulysses)
    expected = [
        sum(int(mask.sum()) for pair in masks for mask in pair),
        sorted(zip(pack.score_row.tolist(), pack.score_target.tolist(), pack.score_side.tolist(), strict=True)),
    ]
    assert [len(got), sorted(got)] == expected
    assert max(sizes) - min(sizes) <= 1


def test_a_wrong_span_is_noticed() -> None:
    """The comparison above can fail: let the rejected side see the chosen one."""
    lengths = [(3, 2, 4)]
    pack = lay_out([PairShape(prompt=3, chosen=2, rejected=4)])
    count = seen(pack, place(pack, cp=1), 1, None, trim=False)
    wrong = allowed(lengths, "shared", 9, None)
    assert (count == wrong).all()
    wrong[5:, 3:5] = True
    assert not (count == wrong).all()


def test_one_long_document_gets_the_zigzag_table() -> None:
    pack = lay_out([PairShape(prompt=1, chosen=62, rejected=1)], multiple=8)
    assert sorted(place(pack, cp=4).chunks) == [(0, 7), (1, 6), (2, 5), (3, 4)]


def test_balanced_chunks_cost_less_at_the_most_than_zigzag_on_packs() -> None:
    rng = random.Random(3)
    worse = 0
    for _ in range(20):
        shapes = [PairShape(prompt=rng.randint(5, 60), chosen=rng.randint(5, 40), rejected=7) for _ in range(12)]
        pack = lay_out(shapes, multiple=16)
        zigzag = Placement(total=pack.total, chunks=tuple((c, 15 - c) for c in range(8)))

        def dearest(placement: Placement, pack: Pack = pack) -> int:
            return max(sum(s.cost() for s in shard(pack, placement, cp_rank=c).spans) for c in range(8))

        balanced = dearest(place(pack, cp=8))
        assert balanced <= dearest(zigzag) * 1.15
        worse += dearest(zigzag) > balanced
    assert worse >= 15


def test_scores_of_one_long_completion_are_dealt_evenly() -> None:
    """A long prompt with short answers puts all supervised rows on the last rank; after the deal each has its share."""
    pack = lay_out([PairShape(prompt=56, chosen=6, rejected=2)], multiple=4)
    shares = deal_scores(pack, place(pack, cp=1, ulysses=4), ulysses=4)
    assert [len(share.send) for share in shares] == [0, 0, 0, 8]
    assert [len(share.score) for share in shares] == [2, 2, 2, 2]
    assert shares[3].send_counts == (2, 2, 2, 2)
    assert shares[0].receive_counts == (0, 0, 0, 2)


def test_padding_to_the_group_keeps_every_token() -> None:
    """case: sp-remainder: 10 tokens over 4 ranks are 3 slots each, all 10 are in a shard, padding is never scored."""
    pack = lay_out([PairShape(prompt=4, chosen=3, rejected=3)], multiple=4)
    placement = place(pack, cp=1, ulysses=4)
    shares = [shard(pack, placement, ulysses_rank=u, ulysses=4) for u in range(4)]
    assert [len(share.token) for share in shares] == [3, 3, 3, 3]
    assert sorted(np.concatenate([share.token for share in shares])) == list(range(12))
    assert (pack.score_target < 10).all()
    assert len(pack.score_target) == 6


def test_targets_do_not_depend_on_the_cut() -> None:
    """case: sp-border-label: ids 1..8 have 7 scores whether the row is cut over 1, 2 or 4 ranks."""
    for ulysses in (1, 2, 4):
        pack = lay_out([PairShape(prompt=1, chosen=6, rejected=1)], multiple=ulysses)
        got, _ = scored(pack, place(pack, cp=1, ulysses=ulysses), ulysses)
        assert sorted(got) == [(0, 1, 0), (0, 7, 1), *((t, t + 1, 0) for t in range(1, 6))]
