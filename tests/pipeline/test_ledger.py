"""`pairledger ledger` on a store whose numbers were worked out by hand, sound and spoiled."""

import json

import pytest

from pipeline.cli import main
from tests.training.ledger import shop
from tests.training.ledger.spoiled import SPOILED, STEPS, spoil


@pytest.fixture
def store(tmp_path):
    return shop.make_store(tmp_path / "store")


def test_a_sound_run_agrees(store, capsys):
    assert main(["ledger", "reconcile", "r", "--store", str(store)]) == 0
    assert capsys.readouterr().out == "r: plan, ledger and manifests agree, to the token\n"
    assert main(["ledger", "reconcile", "--store", str(store), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"r": []}


@pytest.mark.parametrize("way", SPOILED)
def test_a_spoiled_ledger_is_named_and_fails(store, capsys, way):
    assert main(["ledger", "load", "--store", str(store)]) == 0  # also where it was sound when it was loaded
    said = spoil(store, way)
    capsys.readouterr()
    assert main(["ledger", "reconcile", "r", "--store", str(store)]) == 1
    captured = capsys.readouterr()
    assert said in captured.err and "agree" not in captured.out
    assert main(["ledger", "reconcile", "--store", str(store), "--json"]) == 1
    (first, *_) = json.loads(capsys.readouterr().out)["r"]
    assert first.keys() == {"rule", "step", "subject", "expected", "found"}


def test_one_spoiled_run_fails_beside_a_sound_one(store, capsys):
    shop.train(shop.write_run(store, "s"), [shop.step(number) for number in shop.STEPS])
    said = spoil(store, "dropped")
    assert main(["ledger", "reconcile", "--store", str(store)]) == 1
    captured = capsys.readouterr()
    assert said in captured.err and captured.out == "s: plan, ledger and manifests agree, to the token\n"
    assert main(["ledger", "reconcile", "s", "--store", str(store)]) == 0
    assert main(["ledger", "reconcile", "t", "--store", str(store)]) == 1
    assert "has 0 runs named t; there are: r, s" in capsys.readouterr().err


def test_a_file_that_is_refused_keeps_no_answer_back_and_does_not_exit_0(store, capsys):
    shop.train(shop.write_run(store, "s"), [shop.step(1)])
    spoil(store, "corrupted")
    sql = "select run_id, count(*) as steps from step group by run_id"
    assert main(["ledger", "query", sql, "--json", "--store", str(store)]) == 1
    captured = capsys.readouterr()
    assert json.loads(captured.out) == [{"run_id": "s", "steps": 1}]
    assert f"{store / STEPS}:2: not strict JSON" in captured.err
    assert main(["ledger", "path", "--store", str(store)]) == 1
    assert capsys.readouterr().out.strip().endswith(".duckdb")
    assert main(["ledger", "load", "--store", str(store)]) == 1


def test_what_a_load_found_is_said(store, capsys):
    with (store / STEPS).open("ab") as file:
        file.write(b'{"format":1')
    assert main(["ledger", "load", "--json", "--store", str(store)]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["files"], found["missing"], found["repeated"]) == (5, [], [])
    assert found["cut"] == [f"{store / STEPS}:5: the last line was cut after 11 bytes"]
    assert main(["ledger", "rebuild", "--store", str(store)]) == 0
    assert f"{STEPS}:5: the last line was cut" in capsys.readouterr().err


def test_a_store_without_runs_has_nothing_to_reconcile(tmp_path, capsys):
    assert main(["ledger", "reconcile", "--store", str(tmp_path)]) == 1
    assert "has no run to reconcile" in capsys.readouterr().err
