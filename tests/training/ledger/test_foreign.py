"""The meter for rows that others packed: vectors 1 to 9 and 11."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from training.ledger.foreign import IGNORED, ForeignReading, foreign_batch, segments, shift_row
from training.ledger.meter import Unknown, add, checked, over_ranks


def known(*args: Any, **options: Any) -> ForeignReading:
    reading = foreign_batch(*args, pack_tokens=options.pop("pack_tokens", 16), **options)
    assert isinstance(reading, ForeignReading), reading
    return reading


@pytest.mark.parametrize(("ulysses", "physical"), [(1, 5), (2, 6), (4, 8)])
def test_vector_1_one_feature_with_two_documents(ulysses: int, physical: int) -> None:
    reading = known(None, [1, 2, 3, 4, 5], position_ids=[0, 1, 2, 0, 1], ulysses=ulysses)
    assert (reading.shifted_label_tokens, reading.loss_tokens, reading.source_tokens) == (4, 3, 5)
    assert (reading.documents, reading.max_document_tokens, reading.physical_tokens) == (2, 3, physical)


def test_vector_1_the_shift_comes_before_the_row_is_cut() -> None:
    row = shift_row([1, 2, 3, 4, 5]) + [IGNORED]  # padded to 6 for two ranks
    assert [row[:3], row[3:]] == [[2, 3, 4], [5, IGNORED, IGNORED]]


def test_vector_2_a_packer_that_masks_each_first_label() -> None:
    reading = known([0, 3, 5], [1, 2, 3, IGNORED, 5])
    assert (reading.shifted_label_tokens, reading.loss_tokens) == (3, 3)


def test_vector_3_a_padded_window() -> None:
    labels = [*range(5), IGNORED, *range(6), *[IGNORED] * 4]
    reading = known([0, 5, 12, 16], labels, tail=4)
    assert (reading.window_tokens, reading.physical_tokens, reading.aligned_tokens) == (16, 16, 12)
    assert (reading.source_tokens, reading.shifted_label_tokens, reading.loss_tokens) == (12, 10, 10)
    assert (reading.documents, reading.max_document_tokens, reading.sum_document_tokens_squared) == (2, 7, 74)
    assert reading.source_tokens / reading.physical_tokens == 0.75
    assert reading.loss_tokens / reading.source_tokens == 10 / 12
    assert reading.loss_tokens / reading.physical_tokens == 0.625
    assert (reading.physical_tokens / 2, reading.source_tokens / 2) == (8, 6)  # tokens a second over 2 s


def test_vector_4_one_token_segments_at_the_end_need_a_recorded_tail() -> None:
    missing = foreign_batch([0, 3, 4, 5], [1, 2, 3, 4, 5], pack_tokens=16)
    assert isinstance(missing, Unknown) and "documents or padding" in missing.reason
    assert segments([0, 3, 4, 5], 0) == segments([0, 3, 4, 5], tail=0)
    reading = known([0, 3, 4, 5], [1, 2, 3, 4, 5], tail=0)
    assert (reading.documents, reading.sum_document_tokens_squared) == (3, 9 + 1 + 1)
    assert isinstance(foreign_batch([0, 1], [1], pack_tokens=16), Unknown)


@pytest.mark.parametrize("boundaries", [[0, 4, 5, 8], [0, 4, 5, 6, 7, 8]])
def test_vector_5_padding_written_as_segments_is_one_tail(boundaries: list[int]) -> None:
    found = segments(boundaries, 3)
    assert not isinstance(found, Unknown)
    assert (found.documents, found.tail) == ((4, 1), 3)


def test_vector_6_boundaries_of_a_rank_are_not_scaled() -> None:
    local = foreign_batch([0, 3, 7], [1] * 7, pack_tokens=16, cp=2, scope="rank")
    assert isinstance(local, Unknown) and "local to a rank" in local.reason
    boundaries, labels = [0, 12, 16], [1] * 12 + [IGNORED] * 4
    reading = known(boundaries, labels, tail=4, cp=2)
    assert (reading.source_tokens, reading.documents, reading.physical_tokens) == (12, 1, 16)
    assert (boundaries, labels) == ([0, 12, 16], [1] * 12 + [IGNORED] * 4)  # what FLOPs are made from is not touched


@pytest.mark.parametrize(("ulysses", "aligned"), [(1, 20), (2, 24)])
def test_vector_7_context_parallelism_pads_each_document(ulysses: int, aligned: int) -> None:
    reading = known([0, 5, 6, 13], [1] * 13, cp=2, ulysses=ulysses)
    assert (reading.aligned_tokens, reading.source_tokens) == (aligned, 13)


def test_vector_8_a_microbatch_without_labels_silences_both_ranks() -> None:
    good, bad = known([0, 3, 5], [1] * 5), foreign_batch([0, 3, 5], None, pack_tokens=16)
    ranks = [add([good, good]), add([good, bad])]
    calls = 0

    def gather(_: ForeignReading | Unknown) -> list[ForeignReading | Unknown]:
        nonlocal calls
        calls += 1
        return ranks

    for rank in ranks:
        joined = over_ranks(rank, gather)
        assert (joined.total, joined.ranks_reported, joined.unknown_reason) == (
            None,
            1,
            "rank 1: the row has no labels",
        )
    assert calls == 2


def test_vector_8_with_all_labels_the_ranks_add_up() -> None:
    good = known([0, 3, 5], [1] * 5)
    joined = over_ranks(add([good, good]), lambda mine: [mine, good])
    assert joined.total is not None
    assert (joined.total.loss_tokens, joined.total.shifted_label_tokens, joined.total.documents) == (9, 12, 6)


def test_vector_9_a_breach_of_the_order_is_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    breach = ForeignReading(
        window_tokens=16,
        physical_tokens=16,
        aligned_tokens=12,
        source_tokens=9,
        loss_tokens=10,
        shifted_label_tokens=10,
        documents=2,
        max_document_tokens=7,
        sum_document_tokens_squared=74,
    )
    with caplog.at_level(logging.WARNING):
        assert isinstance(checked(breach), Unknown)
    assert "loss_tokens = 10 is more than source_tokens = 9" in caplog.text


def test_vector_11_classification_has_no_generic_count() -> None:
    reading = known([0, 1], [2], tail=0, objective="unshifted")
    assert (reading.shifted_label_tokens, reading.loss_tokens) == (None, 1)


@pytest.mark.parametrize(
    ("boundaries", "labels", "tail", "said"),
    [
        ([1, 3], [1] * 3, 0, "do not rise from 0"),
        ([0, 3, 3], [1] * 3, 0, "do not rise from 0"),
        ([0, 3, 2], [1] * 3, 0, "do not rise from 0"),
        ([], [], 0, "do not rise from 0"),
        ([0, 3, 6], [1] * 4, 0, "4 labels do not belong"),
        ([0, 3, 6], [1] * 6, 3, "6 labels do not belong to 3 tokens"),
        ([0, 3, 6], [1] * 6, 2, "does not begin at a boundary"),
        ([0, 3, 6], [1] * 6, -3, "does not begin at a boundary"),
        ([0, "x"], [1], 0, "not integers"),
    ],
)
def test_malformed_metadata_is_a_reason_not_an_exception(
    boundaries: list[Any], labels: list[int], tail: int, said: str
) -> None:
    found = foreign_batch(boundaries, labels, pack_tokens=16, tail=tail)
    assert isinstance(found, Unknown) and said in found.reason


def test_case_tokens_include_pad() -> None:
    """Sequences of 7 and 3 tokens with answers of 4 and 2, padded to 8: slots 16, real 10, scored 6, padding 6."""
    rows = [
        known([0, n, 8], [IGNORED] * (n - a) + [1] * a + [IGNORED] * (8 - n), tail=8 - n, pack_tokens=8)
        for n, a in ((7, 4), (3, 2))
    ]
    both = add(rows)
    assert isinstance(both, ForeignReading)
    assert (both.physical_tokens, both.source_tokens, both.loss_tokens) == (16, 10, 6)
    assert both.physical_tokens - both.source_tokens == 6 and both.aligned_tokens == 10


@pytest.mark.parametrize("tokens", [2**24 + 1, 2**31 + 1])
def test_vector_10_rows_of_any_size_are_counted_exactly(tokens: int) -> None:
    row = replace(known([0, 3, 5], [1] * 5), physical_tokens=tokens, aligned_tokens=tokens, source_tokens=tokens)
    total = add([row, row, row])
    assert isinstance(total, ForeignReading) and total.source_tokens == 3 * tokens


@pytest.mark.parametrize(("lengths", "multiple"), [([1], 1), ([1, 1, 1], 2), ([7, 1, 7], 4), ([2, 9], 8)])
def test_vectors_1_to_5_with_other_documents(lengths: list[int], multiple: int) -> None:
    """Whatever the documents: the generic shift loses one label a row, the pair shift one a document."""
    boundaries = [0, *np.cumsum(lengths).tolist()]
    total = sum(lengths)
    reading = known(boundaries, [1] * total, tail=0, ulysses=multiple, pack_tokens=64)
    assert (reading.shifted_label_tokens, reading.loss_tokens) == (total - 1, total - len(lengths))
    assert reading.physical_tokens == -(-total // multiple) * multiple
    assert reading.sum_document_tokens_squared == sum(n * n for n in lengths)


def test_arrays_are_taken_as_they_are() -> None:
    reading = known(np.array([0, 3, 5], np.int32), np.array([1, 2, 3, IGNORED, 5]))
    assert (reading.loss_tokens, type(reading.loss_tokens), type(reading.source_tokens)) == (3, int, int)
