"""A pack's integers against numbers worked out by hand and against a second, token-by-token layout."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from training.geometry import Counters, Layout, PairShape, Span, count, lay_out, pack_ids, row_length


def shape(prompt: int, chosen: int, rejected: int, **masks: list[int]) -> PairShape:
    return PairShape(
        prompt=prompt, chosen=chosen, rejected=rejected, **{name: np.array(m, bool) for name, m in masks.items()}
    )


def scores(pack) -> list[tuple[int, int, int]]:
    return list(zip(pack.score_row.tolist(), pack.score_target.tolist(), pack.score_side.tolist(), strict=True))


def test_shared_layout_by_hand() -> None:
    pack = lay_out([shape(3, 2, 1), shape(1, 1, 2)], multiple=4)
    #                 prompt   chosen  rej | prompt chosen rejected | tail
    assert pack.position.tolist() == [0, 1, 2, 3, 4, 3, 0, 1, 1, 2, 0, 1]
    assert pack.spans == (
        Span(0, 5, ((0, 5),)),
        Span(5, 6, ((0, 3), (5, 6))),
        Span(6, 8, ((6, 8),)),
        Span(8, 10, ((6, 7), (8, 10))),
        Span(10, 12, ((10, 12),)),
    )
    assert scores(pack) == [(2, 3, 0), (3, 4, 0), (2, 5, 1), (6, 7, 2), (6, 8, 3), (8, 9, 3)]
    assert (pack.total, pack.used, pack.pairs) == (12, 10, 2)
    assert pack.document_lengths.tolist() == [5, 4, 2, 3]
    assert pack.prompt_tokens.tolist() == [3, 1]


def test_concat_layout_by_hand() -> None:
    pack = lay_out([shape(3, 2, 1)], layout="concat", multiple=4)
    assert pack.position.tolist() == [0, 1, 2, 3, 4, 0, 1, 2, 3, 0, 1, 2]
    assert pack.spans == (Span(0, 5, ((0, 5),)), Span(5, 9, ((5, 9),)), Span(9, 12, ((9, 12),)))
    assert scores(pack) == [(2, 3, 0), (3, 4, 0), (7, 8, 1)]


def test_only_assistant_turns_of_a_completion_are_scored() -> None:
    """A completion of several turns: its first token is not supervised, so the prompt's last row scores one side."""
    pack = lay_out([shape(2, 4, 2, chosen_mask=[0, 1, 0, 1], rejected_mask=[1, 0])])
    assert scores(pack) == [(2, 3, 0), (4, 5, 0), (1, 6, 1)]
    counted = count(pack, pack_tokens=8)
    assert (counted.loss_tokens, counted.chosen_loss_tokens, counted.rejected_loss_tokens) == (3, 2, 1)


@pytest.mark.parametrize("layout", ["shared", "concat"])
def test_the_tail_is_one_segment_and_never_scored(layout: Layout) -> None:
    pack = lay_out([shape(2, 2, 3)], layout=layout, length=64)
    assert pack.spans[-1] == Span(pack.used, 64, ((pack.used, 64),))
    assert sum(span.q0 >= pack.used for span in pack.spans) == 1
    assert pack.score_target.max() < pack.used
    assert all(key < pack.used for span in pack.spans[:-1] for _, end in span.keys for key in (end - 1,))


def test_no_tail_where_the_row_is_full() -> None:
    assert lay_out([shape(2, 1, 1)], multiple=4).spans[-1].q1 == 4
    assert len(lay_out([shape(2, 1, 1)], multiple=4).spans) == 2


def test_an_empty_pack_is_one_multiple_of_padding() -> None:
    pack = lay_out([], multiple=8)
    assert (pack.total, pack.used, pack.pairs) == (8, 0, 0)
    assert pack.spans == (Span(0, 8, ((0, 8),)),)
    assert pack_ids(pack, [], 7).tolist() == [7] * 8
    assert count(pack, pack_tokens=32) == Counters(window_tokens=32, physical_tokens=8, packs=1, empty_packs=1)


def test_padded_borders() -> None:
    """case: padded-seqlens-none: documents of 4 and 3 with cp 2 have the borders 0, 4, 7 and a tail to 8."""
    pack = lay_out([shape(1, 3, 2)], layout="concat", multiple=4)
    assert [span.q0 for span in pack.spans] + [pack.total] == [0, 4, 7, 8]
    assert max(pack.document_lengths) == 4


def test_packed_pair_borders() -> None:
    """case: packed-pair-borders: documents 5, 4, 3, 6 in one row; padding is in none of them and moves no score."""
    pairs = [shape(1, 4, 3), shape(1, 2, 5)]
    pack, padded = (lay_out(pairs, layout="concat", length=length) for length in (None, 32))
    assert [(span.q0, span.q1) for span in pack.spans] == [(0, 5), (5, 9), (9, 12), (12, 18)]
    assert padded.spans == (*pack.spans, Span(18, 32, ((18, 32),)))
    assert scores(padded) == scores(pack)


def test_tokens_exclude_padding() -> None:
    """case: tokens-include-pad: documents of 7 and 3, answers of 4 and 2: 16 slots, 10 real tokens, 6 scored."""
    pair = shape(1, 6, 2, chosen_mask=[0, 0, 1, 1, 1, 1])
    counted = count(lay_out([pair], layout="concat", length=16), pack_tokens=16)
    assert (counted.physical_tokens, counted.source_tokens, counted.loss_tokens) == (16, 10, 6)
    assert counted.physical_tokens - counted.aligned_tokens == 6


@pytest.mark.parametrize("longer", [0, 5])
def test_scored_tokens_are_the_answers(longer: int) -> None:
    """case: rejected-prompt-scored: 2, 3 chosen and 3, 1 rejected tokens, whatever the prompts' lengths."""
    pack = lay_out([shape(3 + longer, 2, 3), shape(2 + longer, 3, 1)])
    assert np.bincount(pack.score_side).tolist() == [2, 3, 3, 1]


def test_documents_of_five_and_seven() -> None:
    """vector 3, in our own row: physical 12 where the foreign batch was padded to its window of 16."""
    pack = lay_out([shape(1, 4, 6)], layout="concat", multiple=4)
    counted = count(pack, pack_tokens=16)
    assert counted == Counters(
        window_tokens=16,
        physical_tokens=12,
        aligned_tokens=12,
        source_tokens=12,
        logical_tokens=12,
        loss_tokens=10,
        chosen_loss_tokens=4,
        rejected_loss_tokens=6,
        documents=2,
        pairs=1,
        packs=1,
        max_document_tokens=7,
        sum_document_tokens_squared=74,
    )


@pytest.mark.parametrize("layout", ["shared", "concat"])
def test_score_rows_never_cross_a_document(layout: Layout) -> None:
    """vector 17: ids 10-13, 20-22, 30-34, 40-43; no side's score is predicted from, or aims at, another document."""
    pairs = [([10], [11, 12, 13], [20, 21, 22]), ([30], [31, 32, 33, 34], [40, 41, 42, 43])]
    pack = lay_out([shape(1, 3, 3), shape(1, 4, 4)], layout=layout, multiple=8)
    ids = pack_ids(pack, pairs, 0)
    read = [[(int(ids[r]), int(ids[t])) for r, t, s in scores(pack) if s == side] for side in range(4)]
    assert read == [
        [(10, 11), (11, 12), (12, 13)],
        [(10, 20), (20, 21), (21, 22)],
        [(30, 31), (31, 32), (32, 33), (33, 34)],
        [(30, 40), (40, 41), (41, 42), (42, 43)],
    ]


def test_pack_ids_refuses_other_lengths() -> None:
    with pytest.raises(AssertionError, match=r"pair 0.*\(1, 3, 2\).*\(1, 2, 2\)"):
        pack_ids(lay_out([shape(1, 1, 1)]), [([1], [2, 3], [4])], 0)


@pytest.mark.parametrize(
    ("used", "buckets", "expected"),
    [
        (0, (), 4),
        (1, (), 4),
        (4, (), 4),
        (5, (), 8),
        (5, (16, 8), 8),
        (9, (8, 16), 16),
        (17, (8, 16), 20),
        (0, (8,), 4),
    ],
)
def test_row_length(used: int, buckets: tuple[int, ...], expected: int) -> None:
    assert row_length(used, multiple=4, buckets=buckets) == expected


@given(st.integers(1, 9), st.integers(0, 9), st.none() | st.integers(1, 12))
def test_span_cost_is_the_number_of_pairs_seen(queries: int, older: int, window: int | None) -> None:
    span = Span(older, older + queries, ((0, older + queries),))
    assert span.cost(window) == sum(min(older + i + 1, window or 99) for i in range(queries))


pairs_strategy = st.lists(st.tuples(*[st.integers(1, 6)] * 3), max_size=5)


@given(pairs_strategy, st.sampled_from(["shared", "concat"]), st.integers(1, 8))
@example([(1, 1, 1)], "shared", 1)
def test_counters_and_scores_from_the_tokens_themselves(lengths, layout: Layout, multiple: int) -> None:
    """Each token is named by what it is, laid out by `pack_ids`; every count is then read off the row."""
    names: list[tuple[int, str, int]] = [(-1, "pad", 0)]

    def named(pair: int, part: str, n: int) -> list[int]:
        names.extend((pair, part, t) for t in range(n))
        return list(range(len(names) - n, len(names)))

    ids = [
        (named(i, "prompt", p), named(i, "chosen", c), named(i, "rejected", r)) for i, (p, c, r) in enumerate(lengths)
    ]
    pack = lay_out([shape(*pair) for pair in lengths], layout=layout, multiple=multiple)
    row = [names[token] for token in pack_ids(pack, ids, 0)]
    for predictor, target, side in scores(pack):
        pair, part, t = row[target]
        assert (pair, part) == (side // 2, "rejected" if side % 2 else "chosen")
        assert row[predictor] == ((pair, part, t - 1) if t else (pair, "prompt", lengths[pair][0] - 1))
        assert pack.position[target] == pack.position[predictor] + 1
    counted = count(pack, pack_tokens=64)
    assert counted.violations() == []
    assert counted.loss_tokens == sum(part in ("chosen", "rejected") for _, part, _ in row)
    assert counted.source_tokens == sum(part != "pad" for _, part, _ in row)
    assert counted.physical_tokens == len(row)
    assert len(row) % multiple == 0
    assert len(row) - counted.source_tokens < multiple or not lengths
    documents = [p + n for p, c, r in lengths for n in (c, r)]
    assert counted.logical_tokens == sum(documents)
    assert counted.sum_document_tokens_squared == sum(n * n for n in documents)
    assert [span.q0 for span in pack.spans] == [0, *(span.q1 for span in pack.spans[:-1])]
    assert pack.spans[-1].q1 == pack.total


def test_counters_add_up_but_for_the_longest() -> None:
    one, two = (count(lay_out([shape(*lengths)]), pack_tokens=32) for lengths in ((2, 3, 4), (5, 1, 1)))
    both = count(lay_out([shape(2, 3, 4), shape(5, 1, 1)]), pack_tokens=32)
    total = one + two
    assert (total.window_tokens, total.packs) == (64, 2)
    assert total.max_document_tokens == 6
    assert (total.sum_document_tokens_squared, total.pairs) == (both.sum_document_tokens_squared, 2)


SOUND = Counters(
    window_tokens=16,
    physical_tokens=12,
    aligned_tokens=10,
    source_tokens=10,
    logical_tokens=12,
    loss_tokens=6,
    chosen_loss_tokens=4,
    rejected_loss_tokens=2,
    documents=2,
    pairs=1,
    packs=1,
    max_document_tokens=8,
    sum_document_tokens_squared=80,
)


@pytest.mark.parametrize(
    ("changed", "sentence"),
    [
        ({"loss_tokens": 11, "chosen_loss_tokens": 9}, "loss_tokens = 11 is more than source_tokens = 10"),
        ({"aligned_tokens": 13}, "aligned_tokens = 13 is more than physical_tokens = 12"),
        ({"logical_tokens": 9}, "source_tokens = 10 is more than logical_tokens = 9"),
        ({"empty_packs": 2}, "empty_packs = 2 is more than packs = 1"),
        ({"documents": 3}, "documents = 3 is not 2 * pairs = 2"),
        ({"empty_packs": -1}, "empty_packs = -1 is negative"),
        ({"loss_tokens": 7}, "loss_tokens = 7 is not chosen_loss_tokens + rejected_loss_tokens = 4 + 2"),
    ],
)
def test_violations_are_sentences(changed: dict[str, int], sentence: str) -> None:
    assert SOUND.violations() == []
    assert replace(SOUND, **changed).violations() == [sentence]
