"""Files that are not as declared: refused by name, keeping no other file out."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.training.ledger import shop
from tests.training.ledger.records import record
from tests.training.ledger.shop import rows
from training.errors import LedgerError
from training.ledger.store import load


def test_case_late_bool_coerced(store: Path) -> None:
    path = store / "runs" / "r" / "attempts" / "0001" / "steps.jsonl"
    lines = path.read_text().splitlines()
    for bad, said in (("1.5", "1.5 is not an integer"), ("true", "true is not an integer")):
        path.write_text("\n".join([*lines[:3], lines[3].replace('"wins":2', f'"wins":{bad}', 1)]) + "\n")
        with pytest.raises(LedgerError) as refused:
            load(store)
        assert f"{path}:4: field wins: {said}" in str(refused.value)
        # the rest of the store is loaded and published, and nothing of the refused file is
        assert rows(store, "select (select count(*) from step), (select count(*) from pair)") == [(0, 5)]
    path.write_text("\n".join(lines) + "\n")
    load(store)
    assert rows(store, "select sum(wins)::bigint from step") == [(6,)]


def test_case_late_bool_coerced_after_twenty_thousand_lines_names_both(store: Path) -> None:
    path = store / "runs" / "r" / "attempts" / "0001" / "steps.jsonl"
    good = [record(number, wins=number).to_line() for number in range(1, 20_481)]
    bad = [record(number, wins=0).to_line().replace('"wins":0', f'"wins":{value}') for number, value in BAD.items()]
    path.write_text("\n".join([*good, *bad]) + "\n")
    with pytest.raises(LedgerError) as refused:
        load(store)
    for number, value in BAD.items():
        assert f"{path}:{number}: field wins: {value} is not an integer" in str(refused.value)
    path.write_text("\n".join([*good, bad[0].replace('"wins":1.5', '"wins":0,"x":1').replace(',"x":1', "")]) + "\n")
    load(store)
    assert rows(store, "select count(*), sum(wins)::bigint from step") == [(20_481, 20_480 * 20_481 // 2)]


BAD = {20_481: "1.5", 20_482: "true"}


def test_one_bad_file_keeps_no_other_out_and_what_was_loaded_of_it_stays(store: Path) -> None:
    shop.train(shop.write_run(store, "s"), [shop.step(1)])
    load(store)
    bad = store / "runs" / "r" / "attempts" / "0001" / "steps.jsonl"
    with bad.open("a") as file:
        file.write("not JSON\n")
    (store / "runs" / "s" / "run.json").write_text("{}")
    shop.train(store / "runs" / "s", [shop.step(2)], from_step=2)
    with pytest.raises(LedgerError) as refused:
        load(store)
    assert f"{bad}:5: not strict JSON" in str(refused.value) and "run.json: run_id: Field required" in str(
        refused.value
    )
    assert rows(store, "select run_id, count(*) from step group by all order by all") == [("r", 4), ("s", 2)]


@pytest.mark.parametrize(
    ("path", "text", "said"),
    [
        ("runs/r/run.json", '{"format": 2}', "format: Input should be 1"),
        ("runs/r/attempts/0001/attempt.json", "{", "attempt.json: : Invalid JSON"),
        ("runs/r/predicted.arrow", "not arrow", "predicted.arrow: is not an Arrow file"),
        ("datasets/a/2026-03-01/d/manifest.json", "{}", "is not a dataset's manifest"),
        ("datasets/a/2026-03-01/d/shard-00000.arrow", "ARROW1", "is not a whole shard"),
    ],
)
def test_files_that_are_not_ours_are_refused_by_name(store: Path, path: str, text: str, said: str) -> None:
    (store / path).write_text(text)
    with pytest.raises(LedgerError, match="not loaded, all else is") as refused:
        load(store)
    assert said in str(refused.value)


def test_a_prediction_of_other_types_is_refused(store: Path) -> None:
    shop.write_prediction(store / "runs" / "r", pairs=[2.0] * 4)
    with pytest.raises(LedgerError, match=r"pairs \(double, not int64\)"):
        load(store)


def test_a_ledger_in_a_folder_that_is_not_its_own_is_refused(store: Path) -> None:
    shutil.copytree(store / "runs" / "r", store / "runs" / "copy")
    with pytest.raises(LedgerError) as refused:
        load(store)
    assert "run_id is 'r', but its folder says 'copy'" in str(refused.value)
    assert rows(store, "select distinct run_id from step") == [("r",)]


def test_a_store_that_cannot_be_written_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "ledger").write_text("a file, not a folder")
    with pytest.raises(LedgerError, match="cannot be written"):
        load(tmp_path)
