"""The step's line: what goes out comes back, and nothing else gets in."""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import UTC, datetime, timedelta, timezone
from typing import Any

import numpy as np
import pytest

from tests.training.ledger.records import MOMENT, record
from training.errors import LedgerError
from training.geometry import Counters
from training.ledger.record import PairRow, SourceRow, StepRecord, parse_line

PAIR = PairRow(
    dataset="ds1:aa",
    shard=0,
    row=3,
    pair_id="pair1:bb",
    occurrence=0,
    policy_chosen_logp=-10.0,
    policy_rejected_logp=-12.0,
    reference_chosen_logp=-11.0,
    reference_rejected_logp=-11.5,
    loss=0.620957,
)
SOURCE = SourceRow(
    source="a\u2028b",
    pairs=1,
    documents=2,
    source_tokens=9,
    logical_tokens=12,
    loss_tokens=6,
    chosen_loss_tokens=4,
    rejected_loss_tokens=2,
    flops=1.5e18,
    loss_sum=0.620957,
    wins=1,
    ties=0,
    chosen_reward_sum=0.1,
    rejected_reward_sum=-0.05,
)
WHOLE = record(7, counters=Counters(window_tokens=2**53 + 1, pairs=1), sources=(SOURCE,), pairs=(PAIR, PAIR))


def test_a_record_comes_back_as_it_went() -> None:
    line = WHOLE.to_line()
    assert "\n" not in line
    assert StepRecord.from_line(line) == WHOLE
    assert StepRecord.from_line(record(1).to_line()) == record(1)


def test_vector_10_counts_beyond_what_a_float_holds_are_exact() -> None:
    counters = Counters(window_tokens=16_777_217, physical_tokens=2**31 + 1, source_tokens=2**53 + 1)
    assert StepRecord.from_line(record(1, counters=counters).to_line()).counters == counters


def test_case_nan_step_not_finite_is_null_and_counted_in_strict_json() -> None:
    bad = replace(PAIR, policy_chosen_logp=float("-inf"), loss=float("nan"))
    written = record(2, loss=float("nan"), grad_norm=float("inf"), pairs=(PAIR, bad), sources=(SOURCE,), nonfinite=1)

    def refuse(text: str) -> None:
        raise AssertionError(text)

    line = json.loads(written.to_line(), parse_constant=refuse)
    assert (line["loss"], line["grad_norm"], line["nonfinite"]) == (None, None, 1 + 2 + 2)
    assert line["pairs"]["loss"] == [PAIR.loss, None]
    assert StepRecord.from_line(written.to_line()) == written.finite() == written.finite().finite()


def test_numbers_of_numpy_are_written_as_what_they_are() -> None:
    written = record(1, wins=np.int64(3), loss=np.float64(0.25), data_s=0)
    assert StepRecord.from_line(written.to_line()) == record(1, wins=3, loss=0.25, data_s=0.0)


def test_times_are_utc_whatever_zone_they_were_taken_in() -> None:
    shanghai = MOMENT.astimezone(timezone(timedelta(hours=8)))
    line = record(1, ended_at=shanghai).to_line()
    assert json.loads(line)["ended_at"] == "2026-03-01T23:30:00.000000Z"
    assert StepRecord.from_line(line).ended_at == datetime(2026, 3, 1, 23, 30, tzinfo=UTC)


def edited(**changes: Any) -> str:
    line = json.loads(WHOLE.to_line())
    for path, value in changes.items():
        *folders, name = path.split("__")
        inner = line
        for folder in folders:
            inner = inner[folder]
        if value is ...:
            del inner[name]
        else:
            inner[name] = value
    return json.dumps(line)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        # case: late-bool-coerced
        (edited(wins=1.5), "field wins: 1.5 is not an integer or null"),
        (edited(wins=True), "field wins: true is not an integer or null"),
        (edited(loss=True), "field loss: true is not a number or null"),
        (edited(counters__pairs=2.0), "field counters.pairs: 2.0 is not an integer"),
        (edited(counters__pairs=None), "field counters.pairs: null is not an integer"),
        (edited(pairs__row=[3, 1.5]), "field pairs.row: 1.5 is not an integer"),
        (edited(pairs__loss=[0.5, "0.5"]), 'field pairs.loss: "0.5" is not a number or null'),
        (edited(step=2**63), "field step: 9223372036854775808 does not fit in 64 bits"),
        (edited(run_id=3), "field run_id: 3 is not text"),
        (edited(colour="red"), "unknown field colour"),
        (edited(pairs__colour=[1, 2]), "unknown field pairs.colour"),
        (edited(loss=...), "field loss is missing"),
        (edited(sources__wins=...), "field sources.wins is missing"),
        (edited(pairs__row=[3]), "columns of unequal lengths"),
        (edited(pairs__row=3), "field pairs.row: a column is a list"),
        (edited(sources=None), "field sources: a JSON object is wanted"),
        (edited(format=2), "format 2, this version reads 1"),
        (edited(format=True), "format True, this version reads 1"),
        (edited(format=...), "format None, this version reads 1"),
        (edited(ended_at="2026-03-01T23:30:00"), "names no zone"),
        (edited(ended_at="yesterday"), "not an ISO 8601 time"),
        (WHOLE.to_line().replace("0.620957", "NaN"), "NaN is not a JSON value"),
        (WHOLE.to_line()[:-9], "not strict JSON"),
        ("[1]", "a JSON object is wanted"),
    ],
)
def test_what_does_not_belong_is_refused_by_name(line: str, said: str) -> None:
    with pytest.raises(LedgerError) as refused:
        parse_line(line)
    assert said in str(refused.value)


def test_an_unedited_line_is_accepted() -> None:
    assert StepRecord.from_line(edited()) == WHOLE
