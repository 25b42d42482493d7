"""From files to DuckDB: everything once, nothing twice, nothing lost."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import fields, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import duckdb
import pytest

from tests.training.ledger import shop
from tests.training.ledger.shop import everything, rows
from training.geometry import Counters
from training.ledger.loader import LoadReport
from training.ledger.store import load, rebuild, snapshot
from training.ledger.writer import LedgerWriter


def test_what_was_written_is_there(store: Path) -> None:
    report = load(store)
    # run.json, predicted.arrow, attempt.json, steps.jsonl, manifest.json
    assert (report.files, report.refused, report.missing, report.cut, report.repeated) == (5, [], [], [], [])
    assert rows(store, "select run_id, layout, created_at from run") == [("r", "shared", datetime(2026, 3, 1, 23))]
    names = ", ".join(f.name for f in fields(Counters))
    assert rows(store, f"select step, {names} from step order by step") == [
        (step, *values) for step, values in shop.COUNTERS.items()
    ]
    assert rows(store, "select source, loss_tokens from step_source where step = 3 order by 1") == [("a", 4), ("b", 6)]
    assert rows(store, 'select "row", occurrence, loss from step_pair where step = 4 order by 1') == [
        (0, 1, 0.4),
        (3, 1, 0.2),
    ]
    assert rows(store, "select outcome, from_step, peak_flops, ended_at is not null from attempt") == [
        ("finished", 1, 1e6, True)
    ]
    found = rows(
        store,
        'select "row", source, locator, prompt_tokens, chosen_tokens, rejected_tokens, chosen_loss_tokens, '
        'rejected_loss_tokens from pair order by "row"',
    )
    assert found == [
        (row, shop.SOURCES[row], f"file.jsonl:{row + 1}", *shop.LENGTHS[row], *shop.SIZES[row][3:]) for row in range(5)
    ]
    assert rows(store, "select dataset, rows, pairs, quarantined, path from dataset") == [
        (shop.DATASET, 6, 5, 1, "datasets/a/2026-03-01/d")
    ]
    assert rows(store, "select source, fingerprint, pairs, quarantined from source order by source") == [
        ("a", "src1:s", 3, 1),
        ("b", "src1:s", 2, 0),
    ]
    assert rows(store, "select source, locator, reason from quarantine") == [("a", "file.jsonl:6", "identical")]
    assert rows(store, "select file, rows, tokens from shard") == [("shard-00000.arrow", 5, 33)]


def test_counts_are_bigint_and_exact(store: Path, tmp_path: Path) -> None:
    big = replace(shop.counters(1), window_tokens=2**53 + 1, source_tokens=16_777_217, physical_tokens=2**31 + 5)
    run_dir = shop.write_run(store, "big", predicted=False)
    shop.train(run_dir, [shop.step(1, counters=big)])
    load(store)
    found = rows(store, "select window_tokens, source_tokens, physical_tokens from step where run_id = 'big'")
    assert found == [(2**53 + 1, 16_777_217, 2**31 + 5)]
    kinds = rows(
        store,
        "select distinct data_type from information_schema.columns where table_name in ('step', 'step_source', "
        "'step_pair', 'pair', 'predicted') and (column_name like '%tokens%' or column_name in ('step', 'pairs'))",
    )
    assert kinds == [("BIGINT",)]


def test_loading_again_reads_and_publishes_nothing(store: Path) -> None:
    first = load(store)
    before = everything(store)
    again = load(store)
    assert (again.files, again.rows, again.snapshot) == (0, 0, first.snapshot)
    assert everything(store) == before


def test_a_ledger_is_read_on_from_where_it_ended(tmp_path: Path) -> None:
    store = tmp_path / "store"
    shop.write_dataset(store / "datasets" / "a" / "2026-03-01" / "d")
    attempt = shop.start(shop.write_run(store))
    writer = LedgerWriter(attempt.steps)
    for number in shop.STEPS:
        writer.append(shop.step(number))
        report = load(store)
        assert rows(store, "select list(step order by step) from step") == [(list(range(1, number + 1)),)]
        if number > 1:
            assert (report.files, report.rows) == (1, 1 + 2 + 2)  # one step, two sources, two pairs
    writer.close()
    incremental = everything(store)
    rebuild(store)
    assert everything(store) == incremental


def test_a_ledger_that_was_rewritten_is_read_from_its_beginning(store: Path) -> None:
    load(store)
    path = store / "runs" / "r" / "attempts" / "0001" / "steps.jsonl"
    path.write_text("".join(shop.step(number, loss=0.125).to_line() + "\n" for number in (1, 2)))
    load(store)
    assert rows(store, "select step, loss from step order by step") == [(1, 0.125), (2, 0.125)]
    # an edit that keeps size and time is still seen
    stat = path.stat()
    path.write_text(path.read_text().replace("0.125", "0.375", 1))
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert path.stat().st_size == stat.st_size
    load(store)
    assert rows(store, "select step, loss from step order by step") == [(1, 0.375), (2, 0.125)]


def test_a_ledger_that_was_emptied_loses_its_rows(store: Path) -> None:
    load(store)
    (store / "runs" / "r" / "attempts" / "0001" / "steps.jsonl").write_bytes(b"")
    load(store)
    assert rows(store, "select (select count(*) from step), (select count(*) from step_pair)") == [(0, 0)]


def test_a_rebuilt_database_is_the_same_row_for_row(store: Path) -> None:
    load(store)
    outside = shop.write_dataset(store.parent / "elsewhere", fingerprint="ds1:" + "e" * 32)
    shop.train(shop.write_run(store, "s", dataset=str(outside)), [shop.step(1), shop.step(2)], outcome=None)
    load(store)
    shop.train(store / "runs" / "s", [shop.step(number) for number in (2, 3, 4)], from_step=2)
    load(store)
    incremental = everything(store)
    assert sum(map(len, incremental.values())) > 60
    report = rebuild(store)
    assert everything(store) == incremental
    assert report.set_aside is not None and (report.set_aside / "writer.duckdb").exists()
    shutil.rmtree(store / "ledger")
    load(store)
    assert everything(store) == incremental


def test_datasets_outside_the_store_are_found_through_the_run_and_missing_ones_are_named(store: Path) -> None:
    outside = shop.write_dataset(store.parent / "elsewhere", fingerprint="ds1:" + "e" * 32)
    shop.write_run(store, "s", dataset=str(outside))
    assert load(store).missing == []
    assert rows(store, "select path from dataset order by path") == [(str(outside),), ("datasets/a/2026-03-01/d",)]
    shutil.rmtree(outside)
    assert load(store).missing == [f"run s used {outside}, where there is no dataset now"]


def test_one_version_in_two_places_is_loaded_once_and_named_by_the_store(store: Path) -> None:
    inside = store / "datasets" / "a" / "2026-03-01" / "d"
    outside = shop.write_dataset(store.parent / "elsewhere", locators="other.jsonl")
    shop.write_run(store, "s", dataset=str(outside))
    hidden = store.parent / "hidden"
    inside.rename(hidden)
    load(store)
    assert rows(store, "select path from dataset") == [(str(outside),)]
    hidden.rename(inside)
    load(store)
    assert rows(store, "select path from dataset") == [("datasets/a/2026-03-01/d",)]
    assert rows(store, "select count(*), min(locator) from pair") == [(5, "file.jsonl:1")]
    incremental = everything(store)
    rebuild(store)
    assert everything(store) == incremental


def test_case_rerun_same_steps(store: Path) -> None:
    # two steps, then a resumed attempt that writes step 2 twice: tokens 21, then 22
    def tokens(number: int, count: int) -> Any:
        return shop.step(number, counters=replace(shop.counters(number), source_tokens=count))

    run_dir = shop.write_run(store, "s", predicted=False)
    shop.train(run_dir, [tokens(1, 10), tokens(2, 20)], outcome=None)
    shop.train(run_dir, [tokens(2, 21), tokens(2, 22)], from_step=2)
    for _ in range(3):
        report = load(store)
    current = "select attempt, step, source_tokens from current_step where run_id = 's' order by step"
    assert rows(store, current) == [(1, 1, 10), (2, 2, 22)]
    assert rows(store, "select attempt, step, source_tokens from step where run_id = 's' order by all") == [
        (1, 1, 10),
        (1, 2, 20),
        (2, 2, 22),
    ]
    assert rows(store, "select sum(source_tokens)::bigint from current_step where run_id = 's'") == [(32,)]
    assert rows(store, "select attempt, step, voided_by, source_tokens from waste") == [(1, 2, 2, 20)]
    assert rows(store, "select count(*) from step_pair where run_id = 's' and attempt = 2") == [(2,)]
    assert report.repeated == []  # nothing was read anew
    assert [line.rpartition("/")[2] for line in rebuild(store).repeated] == [
        "steps.jsonl:2: step 2 again; this line stands"
    ]


def test_a_step_repeated_over_two_loads_stands_with_its_last_line(store: Path) -> None:
    attempt = shop.start(shop.write_run(store, "s"))
    writer = LedgerWriter(attempt.steps)
    writer.append(shop.step(1, run_id="s", loss=0.25))
    load(store)
    writer.append(shop.step(1, run_id="s", loss=0.75))
    writer.close()
    assert "step 1 again" in load(store).repeated[0]
    assert rows(store, "select loss from step where run_id = 's'") == [(0.75,)]
    incremental = everything(store)
    rebuild(store)
    assert everything(store) == incremental


def test_a_cut_last_line_is_reported_and_everything_before_it_is_loaded(store: Path) -> None:
    path = store / "runs" / "r" / "attempts" / "0001" / "steps.jsonl"
    path.write_bytes(path.read_bytes()[:-20])
    report = load(store)
    assert len(report.cut) == 1 and f"{path}:4: the last line was cut" in report.cut[0]
    assert rows(store, "select count(*) from step") == [(3,)]
    assert rows(store, "select lines, cut_line from loaded where path like '%steps.jsonl'") == [(3, 4)]


@pytest.mark.parametrize("zone", ["UTC", "Asia/Shanghai", "America/New_York"])
def test_case_naive_timestamps(store: Path, zone: str) -> None:
    attempt = store / "runs" / "r" / "attempts" / "0001"
    moments = {1: datetime(2026, 3, 1, 23, 30, tzinfo=UTC), 2: datetime(2026, 3, 2, 0, 10, tzinfo=UTC)}
    lines = [shop.step(number, ended_at=moment).to_line() for number, moment in moments.items()]
    (attempt / "steps.jsonl").write_text("\n".join(lines) + "\n")
    days = "select ended_at::date::varchar, count(*) from step group by all order by all"
    script = (
        "import sys; from training.ledger.store import load, query\n"
        f"load(sys.argv[1]); print(query(sys.argv[1], {days!r})[1])"
    )
    environment = {**os.environ, "TZ": zone}
    done = subprocess.run(
        [sys.executable, "-c", script, str(store)], env=environment, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[('2026-03-01', 1), ('2026-03-02', 1)]"
    with duckdb.connect(str(snapshot(store)), read_only=True) as session:  # a reader of its own
        session.execute(f"set timezone = '{zone}'")
        assert session.execute(days).fetchall() == [("2026-03-01", 1), ("2026-03-02", 1)]


@pytest.mark.parametrize("bad", ["nan", "inf", "-inf"])
def test_case_nan_step(store: Path, bad: str) -> None:
    path = store / "runs" / "r" / "attempts" / "0001" / "steps.jsonl"
    losses = {1: 0.7, 2: float(bad), 3: 0.5}
    path.write_text("".join(shop.step(number, loss=loss).to_line() + "\n" for number, loss in losses.items()))
    load(store)
    found = rows(store, "select mean_loss, max_loss, nonfinite_steps, first_nonfinite_step, steps from run_summary")
    assert found == [(pytest.approx(0.6), 0.7, 1, 2, 3)]


def test_an_empty_store_is_an_empty_database(tmp_path: Path) -> None:
    report = load(tmp_path)
    assert isinstance(report, LoadReport) and report.rows == 0
    assert rows(tmp_path, "select count(*) from run_summary") == [(0,)]
