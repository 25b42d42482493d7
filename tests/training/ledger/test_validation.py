"""Held-out judgements on their way from an attempt's folder to the database."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.training.ledger import shop
from training.errors import LedgerError
from training.ledger.store import load, query, rebuild
from training.ledger.validation import VALIDATION, ValidationRow, append_validation, read_validation


def row(step: int, source: str, wins: int, loss_sum: float | None = 3.0) -> ValidationRow:
    return ValidationRow(
        step=step,
        source=source,
        pairs=4,
        wins=wins,
        ties=0,
        chosen_reward_sum=2.0,
        rejected_reward_sum=1.0,
        loss_sum=loss_sum,
    )


def test_rows_are_loaded_once_and_read_as_means(tmp_path: Path) -> None:
    store = shop.make_store(tmp_path / "store")
    (attempt,) = (store / "runs").glob("*/attempts/*")
    append_validation(attempt, [row(1, "a", 1), row(1, "b", 3)])
    load(store)
    append_validation(attempt, [row(3, "a", 4, None)])
    load(store)
    asked = "select step, source, accuracy, margin, loss from current_validation order by 1, 2"
    wanted = [(1, "a", 0.25, 0.25, 0.75), (1, "b", 0.75, 0.25, 0.75), (3, "a", 1.0, 0.25, None)]
    assert query(store, asked)[1] == wanted
    rebuild(store)
    assert query(store, asked)[1] == wanted


def test_a_line_that_cannot_be_read_is_named_and_a_cut_one_is_no_row(tmp_path: Path) -> None:
    append_validation(tmp_path, [row(1, "a", 1)])
    path = tmp_path / VALIDATION
    whole = path.read_text(encoding="utf-8")
    path.write_text(whole + whole[:20], encoding="utf-8")
    assert read_validation(path) == [row(1, "a", 1)]
    path.write_text(whole.replace('"wins":1', '"wins":"many"'), encoding="utf-8")
    with pytest.raises(LedgerError, match=r"validation\.jsonl:1: wins: "):
        read_validation(path)
