"""Our own packs, counted by hand; vectors 3, 7, 8, 9, 12."""

from __future__ import annotations

import logging
from dataclasses import fields, replace

import numpy as np
import pytest

from training.geometry import Counters, PairShape, count, lay_out
from training.ledger.flops import ModelShape, keys, model_shape, pair_flops
from training.ledger.meter import Reading, SourceCounts, Unknown, add, checked, join, measure, over_ranks

A = PairShape(prompt=3, chosen=4, rejected=2)
B = PairShape(prompt=1, chosen=5, rejected=3, chosen_mask=np.array([False, True, True, False, True]))


def test_a_step_and_its_sources_by_hand() -> None:
    packs = [lay_out([A, B], multiple=4), lay_out([], multiple=4)]
    reading = measure(packs, [["a", "b"], []], pack_tokens=32)
    assert isinstance(reading, Reading)
    assert reading.counters == Counters(
        window_tokens=64,
        physical_tokens=24,  # 9 + 9 = 18 up to 20, and an empty row of 4
        aligned_tokens=18,
        source_tokens=18,
        logical_tokens=12 + 10,
        loss_tokens=6 + 6,
        chosen_loss_tokens=4 + 3,
        rejected_loss_tokens=2 + 3,
        documents=4,
        pairs=2,
        packs=2,
        empty_packs=1,
        max_document_tokens=7,
        sum_document_tokens_squared=49 + 25 + 36 + 16,
    )
    assert reading.flops is None
    assert reading.sources["a"] == SourceCounts(
        pairs=1,
        documents=2,
        source_tokens=9,
        logical_tokens=12,
        loss_tokens=6,
        chosen_loss_tokens=4,
        rejected_loss_tokens=2,
        flops=None,
    )
    assert reading.sources["b"].loss_tokens == 6


def test_concat_counts_the_prompt_twice_for_source_tokens_only() -> None:
    shared, concat = (
        measure([lay_out([A, B], layout=layout)], [["a", "b"]], pack_tokens=32) for layout in ("shared", "concat")
    )
    assert isinstance(shared, Reading) and isinstance(concat, Reading)
    assert (shared.counters.source_tokens, concat.counters.source_tokens) == (18, 22)
    assert (shared.sources["a"].source_tokens, concat.sources["a"].source_tokens) == (9, 12)
    same = ("logical_tokens", "loss_tokens", "documents", "pairs", "sum_document_tokens_squared")
    assert all(getattr(shared.counters, name) == getattr(concat.counters, name) for name in same)


def test_vector_12_tokens_follow_the_pair_not_the_row_parity() -> None:
    # documents of (3, 2) and (4, 4) tokens, prompts of one token
    shapes = [PairShape(prompt=1, chosen=2, rejected=1), PairShape(prompt=1, chosen=3, rejected=3)]
    reading = measure([lay_out(shapes)], [["A", "B"]], pack_tokens=16)
    assert isinstance(reading, Reading)
    assert {name: (s.pairs, s.logical_tokens) for name, s in reading.sources.items()} == {"A": (1, 5), "B": (1, 8)}


def test_vectors_3_and_7_in_our_own_rows() -> None:
    # 3: documents of 5 and 7 tokens; the row is not padded to the window
    three = count(lay_out([PairShape(prompt=1, chosen=4, rejected=6)], layout="concat"), pack_tokens=16)
    assert (three.window_tokens, three.physical_tokens, three.sum_document_tokens_squared) == (16, 12, 74)
    # 7: 13 tokens under cp 2 are padded once, at the tail, to a multiple of 4
    seven = count(lay_out([PairShape(prompt=1, chosen=4, rejected=7)], layout="concat", multiple=4), pack_tokens=16)
    assert (seven.physical_tokens, seven.aligned_tokens, seven.source_tokens) == (16, 13, 13)


def test_topology_changes_room_and_never_what_was_learned() -> None:
    one = measure([lay_out([A, B])], [["a", "b"]], pack_tokens=32)
    two = [measure([lay_out([shape], multiple=4)], [[name]], pack_tokens=32) for shape, name in ((A, "a"), (B, "b"))]
    joined = join(two).total
    assert isinstance(one, Reading) and joined is not None
    differing = {f.name for f in fields(Counters) if getattr(one.counters, f.name) != getattr(joined.counters, f.name)}
    assert differing == {"window_tokens", "physical_tokens", "packs"}
    assert joined.sources == one.sources


def test_vector_8_one_rank_that_does_not_know_makes_the_step_unknown_with_one_collective_each() -> None:
    known = Reading(counters=count(lay_out([A]), pack_tokens=16), sources={"a": _of(A)})
    ranks = [add([known, known]), add([known, Unknown("no labels in microbatch 1")])]
    calls: list[object] = []

    def gather(reading: Reading | Unknown) -> list[Reading | Unknown]:
        calls.append(reading)
        return ranks

    results = [over_ranks(rank, gather) for rank in ranks]
    assert calls == ranks
    for joined in results:
        assert (joined.total, joined.ranks_expected, joined.ranks_reported) == (None, 2, 1)
        assert joined.unknown_reason == "rank 1: no labels in microbatch 1"


def test_all_ranks_known_adds_them_and_a_group_mate_reports_nothing_twice() -> None:
    known = Reading(counters=count(lay_out([A]), pack_tokens=16), sources={"a": _of(A)}, flops=5)
    joined = join([known, Reading(), known, Reading()])
    assert (joined.ranks_expected, joined.ranks_reported, joined.unknown_reason) == (4, 4, None)
    assert joined.total is not None
    assert (joined.total.counters.loss_tokens, joined.total.counters.max_document_tokens) == (12, 7)
    assert (joined.total.sources["a"].source_tokens, joined.total.flops) == (18, 10)


def test_vector_9_a_broken_order_warns_and_is_unknown(caplog: pytest.LogCaptureFixture) -> None:
    counters = replace(count(lay_out([A]), pack_tokens=16), loss_tokens=10, chosen_loss_tokens=8, source_tokens=9)
    with caplog.at_level(logging.WARNING):
        found = checked(
            Reading(counters=counters, sources={"a": replace(_of(A), loss_tokens=10, chosen_loss_tokens=8)})
        )
    assert isinstance(found, Unknown)
    assert "loss_tokens = 10 is more than source_tokens = 9" in found.reason
    assert "loss_tokens = 10" in caplog.text


def test_sources_that_do_not_add_up_are_noticed() -> None:
    found = checked(Reading(counters=count(lay_out([A, B]), pack_tokens=32), sources={"a": _of(A)}))
    assert isinstance(found, Unknown)
    assert "pairs of the sources add up to 1, the step has 2" in found.reason


def test_what_is_measured_is_not_changed() -> None:
    """The packs' arrays may not even be written to, and are the same afterwards, byte for byte."""
    packs = [lay_out([A, B], multiple=4), lay_out([B])]
    arrays = [
        value
        for pack in packs
        for name in pack.__dataclass_fields__
        if isinstance(value := getattr(pack, name), np.ndarray)
    ]
    before = [array.tobytes() for array in arrays]
    for array in arrays:
        array.setflags(write=False)
    assert len(arrays) > 6 and isinstance(measure(packs, [["a", "b"], ["b"]], pack_tokens=32, model=TINY), Reading)
    assert [array.tobytes() for array in arrays] == before


def test_a_fault_in_the_counting_does_not_reach_training(caplog: pytest.LogCaptureFixture) -> None:
    found = measure([lay_out([A, B])], [["a"]], pack_tokens=32)  # a source is missing
    assert isinstance(found, Unknown)
    assert "meter failed" in found.reason and "meter failed" in caplog.text


def _of(shape: PairShape) -> SourceCounts:
    return SourceCounts(
        pairs=1,
        documents=2,
        source_tokens=shape.prompt + shape.chosen + shape.rejected,
        logical_tokens=2 * shape.prompt + shape.chosen + shape.rejected,
        loss_tokens=shape.chosen + shape.rejected,
        chosen_loss_tokens=shape.chosen,
        rejected_loss_tokens=shape.rejected,
    )


TINY = ModelShape(hidden=4, heads=2, kv_heads=1, head_dim=2, intermediate=6, vocabulary=10, full_layers=1)


def test_flops_by_hand() -> None:
    # weights: q 4*4, k 4*2, v 4*2, o 4*4 = 48; gate, up, down 3*4*6 = 72
    assert TINY.weights == 120
    # prompt 2, chosen 1, rejected 2: keys 3 + (2 + 1) + (4 + 3) = 13
    flops = pair_flops(TINY, prompt=2, chosen=1, rejected=2, supervised=3)
    assert flops == 3 * (2 * 5 * 120 + 4 * 2 * 2 * 13 + 2 * 3 * 4 * 10)


def test_flops_of_a_pair_are_those_of_two_documents_less_one_prompt() -> None:
    whole = pair_flops(TINY, prompt=5, chosen=3, rejected=7, supervised=10)
    # a document alone: a pair with nothing on the other side
    sides = [pair_flops(TINY, prompt=5, chosen=n, rejected=0, supervised=n) for n in (3, 7)]
    prompt = pair_flops(TINY, prompt=5, chosen=0, rejected=0, supervised=0)
    assert whole == sum(sides) - prompt


@pytest.mark.parametrize(("tokens", "window"), [(0, None), (7, None), (7, 3), (2, 3), (3, 3), (9, 1)])
def test_keys_is_the_sum_over_queries(tokens: int, window: int | None) -> None:
    assert keys(tokens, window) == sum(min(q + 1, window or tokens) for q in range(tokens))


def test_model_shape_reads_what_it_knows_and_refuses_to_guess() -> None:
    config = {
        "model_type": "qwen3",
        "hidden_size": 4,
        "num_hidden_layers": 3,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "intermediate_size": 6,
        "vocab_size": 10,
        "sliding_window": 8,
        "layer_types": ["full_attention", "sliding_attention", "sliding_attention"],
    }
    assert model_shape(config) == replace(TINY, full_layers=1, sliding_layers=2, window=8)
    assert model_shape({**config, "layer_types": None, "use_sliding_window": False}) == replace(TINY, full_layers=3)
    assert model_shape({**config, "layer_types": ["linear_attention"]}) is None
    assert model_shape({**config, "model_type": "mixtral"}) is None
    assert model_shape({k: v for k, v in config.items() if k != "intermediate_size"}) is None


def test_measured_flops_are_the_sum_over_pairs() -> None:
    reading = measure([lay_out([A, B])], [["a", "a"]], pack_tokens=32, model=TINY)
    assert isinstance(reading, Reading)
    expected = pair_flops(TINY, prompt=3, chosen=4, rejected=2, supervised=6)
    expected += pair_flops(TINY, prompt=1, chosen=5, rejected=3, supervised=6)
    assert reading.flops == reading.sources["a"].flops == expected
