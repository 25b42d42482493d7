"""Plan, ledger and manifests: sound accounts agree, and each way of spoiling one is found where it was spoiled."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.training.ledger import shop
from training.errors import LedgerError
from training.geometry import PairShape, lay_out
from training.ledger.meter import Reading, measure
from training.ledger.reconcile import Difference, reconcile, require_reconciled
from training.ledger.record import StepRecord
from training.ledger.store import load, query


@pytest.fixture
def make(tmp_path: Path) -> Callable[[Sequence[StepRecord]], Path]:
    """A loaded store whose run wrote these steps in one finished attempt."""

    def write_and_load(steps: Sequence[StepRecord]) -> Path:
        root = tmp_path / "store"
        shop.write_dataset(root / "datasets" / "a" / "2026-03-01" / "d")
        shop.train(shop.write_run(root), steps)
        load(root)
        return root

    return write_and_load


Make = Callable[[Sequence[StepRecord]], Path]
WHOLE = [shop.step(number) for number in shop.STEPS]


def found(store: Path) -> set[tuple[str, int | None, str, str, str]]:
    return {(d.rule, d.step, d.subject, d.expected, d.found) for d in reconcile(store, "r")}


def test_the_hand_made_store_is_what_the_meter_counts(tmp_path: Path) -> None:
    """Two implementations: the page of numbers in `shop`, and the geometry."""
    for step, rows in shop.STEPS.items():
        packs = [[row] for row in rows] if step == 1 else [list(rows)]
        shapes = {
            row: PairShape(prompt=p, chosen=c, rejected=r, chosen_mask=_mask(row))
            for row, (p, c, r) in enumerate(shop.LENGTHS)
        }
        laid = [lay_out([shapes[row] for row in pack]) for pack in packs]
        reading = measure(laid, [[shop.SOURCES[row] for row in pack] for pack in packs], pack_tokens=16)
        assert isinstance(reading, Reading) and reading.counters == shop.counters(step)
        counted = {(name, s.source_tokens, s.logical_tokens, s.loss_tokens) for name, s in reading.sources.items()}
        assert counted == {(shop.SOURCES[row], *shop.SIZES[row][:3]) for row in rows}


def _mask(row: int) -> Any:
    import numpy as np

    return np.array(shop.MASKS[row]) if row in shop.MASKS else None


def test_a_sound_run_has_no_differences(make: Make) -> None:
    store = make(WHOLE)
    assert reconcile(store, "r") == []
    require_reconciled(store, "r")
    # not for want of anything to compare
    assert query(store, "select status, count(*) from plan_vs_actual group by all")[1] == [("equal", 4 * 15)]


def test_a_resumed_run_is_sound_too(make: Make) -> None:
    store = make(WHOLE[:3])
    shop.train(store / "runs" / "r", WHOLE[1:], from_step=2)
    load(store)
    assert reconcile(store, "r") == []
    assert query(store, "select count(*) from waste")[1] == [(2,)]


def test_a_run_that_goes_on_is_sound_as_far_as_it_got(tmp_path: Path) -> None:
    shop.write_dataset(tmp_path / "datasets" / "a" / "2026-03-01" / "d")
    shop.train(shop.write_run(tmp_path), WHOLE[:2], outcome=None)
    load(tmp_path)
    assert reconcile(tmp_path, "r") == []
    statuses = query(tmp_path, "select step, any_value(status) from plan_vs_actual group by all order by all")[1]
    assert statuses == [(1, "equal"), (2, "equal"), (3, "pending"), (4, "pending")]


def test_a_corrupted_line_is_found(make: Make) -> None:
    store = make(WHOLE)
    path = store / "runs" / "r" / "attempts" / "0001" / "steps.jsonl"
    lines = path.read_bytes().split(b"\n")
    lines[1] = lines[1].replace(b'"loss":', b'"loss";', 1)
    path.write_bytes(b"\n".join(lines))
    with pytest.raises(LedgerError, match=r"steps\.jsonl:2: not strict JSON"):
        load(store)
    rules = {(d.rule, d.subject) for d in reconcile(store, "r")}
    assert ("line can be read", "runs/r/attempts/0001/steps.jsonl:2") in rules
    assert ("ledger is loaded", "runs/r/attempts/0001/steps.jsonl") in rules


def test_a_dropped_step_is_found(make: Make) -> None:
    store = make([WHOLE[0], WHOLE[2], WHOLE[3]])
    assert ("plan = ledger", 2, "pairs", "2", "missing") in found(store)
    # the pairs of step 2 were to be seen again later
    assert ("occurrence = times seen before", 3, f"{shop.DATASET} shard 0 row 2", "0", "1") in found(store)


def test_a_dropped_last_step_of_a_finished_run_is_found(make: Make) -> None:
    store = make(WHOLE[:3])
    assert found(store) == {("plan = ledger", 4, "pairs", "2", "missing")}


def test_a_doubled_step_is_found(make: Make) -> None:
    store = make([*WHOLE[:2], WHOLE[1], *WHOLE[2:]])
    assert found(store) == {("step once an attempt", 2, "runs/r/attempts/0001/steps.jsonl", "1 line", "2 lines")}


def test_a_step_under_another_ones_number_is_found(make: Make) -> None:
    again = replace(WHOLE[0], step=5, epoch=2)
    store = make([*WHOLE, again])
    assert ("plan = ledger", 5, "pairs", "unplanned", "2") in found(store)
    assert ("occurrence = times seen before", 5, f"{shop.DATASET} shard 0 row 0", "2", "0") in found(store)


def test_two_swapped_sources_are_found(make: Make) -> None:
    a, b = WHOLE[1].sources
    swapped = replace(WHOLE[1], sources=(replace(a, source="b"), replace(b, source="a")))
    store = make([WHOLE[0], swapped, *WHOLE[2:]])
    rule = "source = lengths of its pairs in the shards"
    assert found(store) == {
        # both lie in 6 tokens: what differs is their size without sharing, and what is supervised
        (rule, 2, "a logical_tokens", "8", "10"),
        (rule, 2, "b logical_tokens", "10", "8"),
        (rule, 2, "a loss_tokens", "4", "2"),
        (rule, 2, "b loss_tokens", "2", "4"),
        (rule, 2, "a chosen_loss_tokens", "2", "1"),
        (rule, 2, "b chosen_loss_tokens", "1", "2"),
        (rule, 2, "a rejected_loss_tokens", "2", "1"),
        (rule, 2, "b rejected_loss_tokens", "1", "2"),
    }


def test_a_single_token_too_many_is_found_in_every_account_it_breaks(make: Make) -> None:
    counters = replace(shop.counters(3), source_tokens=16)
    store = make([*WHOLE[:2], replace(WHOLE[2], counters=counters), WHOLE[3]])
    assert found(store) == {
        ("plan = ledger", 3, "source_tokens", "15", "16"),
        ("step = sum of its sources", 3, "source_tokens", "16", "15"),
    }


def test_unknown_steps_fail(make: Make) -> None:
    unknown = replace(WHOLE[1], counters=None, ranks_expected=2, unknown_reason="rank 1: no labels")
    unknown = replace(
        unknown, sources=tuple(replace(s, pairs=None, loss_tokens=None, source_tokens=None) for s in unknown.sources)
    )
    store = make([WHOLE[0], unknown, *WHOLE[2:]])
    assert ("plan = ledger", 2, "pairs", "2", "unknown") in found(store)
    assert query(store, "select unknown_steps, steps, pairs from run_summary")[1] == [(1, 4, 6)]


def test_a_pair_that_is_not_the_datasets_and_one_twice_in_a_step_are_found(make: Make) -> None:
    first, second = WHOLE[1].pairs
    other = replace(second, pair_id="pair1:other")
    nowhere = replace(first, row=77, occurrence=0)
    store = make(
        [WHOLE[0], replace(WHOLE[1], pairs=(nowhere, other)), replace(WHOLE[2], pairs=WHOLE[2].pairs * 2), WHOLE[3]]
    )
    rule = "pair stands in a loaded dataset"
    differences = found(store)
    assert (rule, 2, f"{shop.DATASET} shard 0 row 77", "pair1:2", "no such row") in differences
    assert (rule, 2, f"{shop.DATASET} shard 0 row 3", "pair1:other", "pair1:3") in differences
    assert ("pair once a step", 3, f"{shop.DATASET} shard 0 row 1", "1", "2") in differences


def test_more_wins_than_pairs_are_found(make: Make) -> None:
    store = make([replace(WHOLE[0], wins=3), *WHOLE[1:]])
    assert found(store) == {("wins and ties are pairs", 1, "wins + ties", "at most 2", "4")}


def test_a_manifest_that_promises_other_tokens_and_a_dataset_that_is_gone_are_found(make: Make) -> None:
    store = make(WHOLE)
    manifest = store / "datasets" / "a" / "2026-03-01" / "d" / "manifest.json"
    manifest.write_text(manifest.read_text().replace('"chosen": 13', '"chosen": 14'))
    load(store)
    assert found(store) == {("manifest = shards", None, f"{shop.DATASET} chosen_tokens", "14", "13")}
    manifest.unlink()
    (store / "ledger" / "current.duckdb").unlink()
    (store / "ledger" / "writer.duckdb").unlink()
    load(store)
    gone = ("dataset of the run is loaded", None, shop.DATASET, "datasets/a/2026-03-01/d", "not loaded")
    assert gone in found(store)


def test_steps_of_another_topology_need_not_have_the_same_room(make: Make) -> None:
    two_packs = replace(shop.counters(2), window_tokens=32, packs=2)
    store = make([WHOLE[0], replace(WHOLE[1], counters=two_packs)])
    attempt = shop.start(store / "runs" / "r", from_step=3, dp_shard=2)
    attempt.steps.write_text("".join(replace(one, attempt=2).to_line() + "\n" for one in WHOLE[2:]))
    load(store)
    assert reconcile(store, "r") == []
    sql = "select counter, difference from plan_vs_actual where status = 'other topology' order by all"
    assert query(store, sql)[1] == [("packs", 1), ("window_tokens", 16)]


def test_a_run_without_prediction_is_not_called_sound(tmp_path: Path) -> None:
    shop.write_dataset(tmp_path / "datasets" / "a" / "2026-03-01" / "d")
    shop.train(shop.write_run(tmp_path, predicted=False), WHOLE)
    load(tmp_path)
    assert found(tmp_path) == {("plan = ledger", step, "pairs", "unplanned", "2") for step in shop.STEPS}


def test_what_is_not_loaded_is_said(make: Make) -> None:
    store = make(WHOLE[:3])
    path = store / "runs" / "r" / "attempts" / "0001" / "steps.jsonl"
    path.write_text(path.read_text() + WHOLE[3].to_line() + "\n")
    assert any(d.rule == "ledger is loaded" and d.found.startswith("3 lines") for d in reconcile(store, "r"))
    load(store)
    assert reconcile(store, "r") == []
    with pytest.raises(LedgerError, match=r"no run nobody is loaded; the newest are \['r'\]"):
        reconcile(store, "nobody")


def test_the_check_spells_out_what_differs(make: Make) -> None:
    store = make([*WHOLE[:2], replace(WHOLE[2], wins=3), WHOLE[3]])
    with pytest.raises(LedgerError) as refused:
        require_reconciled(store, "r")
    assert "plan, ledger and manifests: 1\n" in str(refused.value)
    assert "wins and ties are pairs: step 3, wins + ties: at most 2 expected, 3 found" in str(refused.value)
    assert str(Difference(rule="r", step=None, subject="s", expected="1", found="2")) == "r: s: 1 expected, 2 found"
