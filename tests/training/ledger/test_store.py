"""From files to DuckDB: everything once, nothing twice, nothing lost."""

from __future__ import annotations

import errno
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
from training.errors import LedgerError
from training.geometry import Counters
from training.ledger import database, publish
from training.ledger.loader import LoadReport
from training.ledger.store import load, query, rebuild, snapshot
from training.ledger.writer import LedgerWriter

TABLES = (
    *("run", "run_dataset", "attempt", "step", "step_source", "step_pair", "predicted"),
    *("dataset", "source", "shard", "pair", "quarantine", "loaded"),
)


def rows(store: Path, sql: str) -> list[tuple[Any, ...]]:
    return query(store, sql)[1]


def everything(store: Path) -> dict[str, list[tuple[Any, ...]]]:
    return {table: rows(store, f"select * from {table} order by all") for table in TABLES}


@pytest.fixture
def store(tmp_path: Path) -> Path:
    return shop.make_store(tmp_path / "store")


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


def test_case_nan_step(store: Path) -> None:
    path = store / "runs" / "r" / "attempts" / "0001" / "steps.jsonl"
    losses = {1: 0.7, 2: float("nan"), 3: 0.5}
    path.write_text("".join(shop.step(number, loss=loss).to_line() + "\n" for number, loss in losses.items()))
    load(store)
    found = rows(store, "select mean_loss, max_loss, nonfinite_steps, first_nonfinite_step, steps from run_summary")
    assert found == [(pytest.approx(0.6), 0.7, 1, 2, 3)]


def write_wal(store: Path) -> Path:
    """A loader that was killed after it had committed, before its log was merged."""
    script = (
        "import os, sys, signal, duckdb\n"
        "from pathlib import Path\n"
        "from training.ledger.database import open_writer\n"
        "from training.ledger.loader import Loader, LoadReport\n"
        "root = Path(sys.argv[1]); (root / 'ledger').mkdir(exist_ok=True)\n"
        "connection = open_writer(root / 'ledger', 1)\n"
        "connection.execute('checkpoint')\n"
        "loader = Loader(root, connection, LoadReport())\n"
        "loader.run(root / 'runs' / 'r'); loader.datasets()\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    assert subprocess.run([sys.executable, "-c", script, str(store)], check=False).returncode == -9
    log = store / "ledger" / "writer.duckdb.wal"
    assert log.stat().st_size > 1000
    return log


@pytest.mark.parametrize("damage", ["none", "cut", "flip", "file"])
def test_case_wal_after_kill(store: Path, damage: str) -> None:
    log = write_wal(store)
    data = log.read_bytes()
    if damage == "cut":
        log.write_bytes(data[:-7])
    if damage == "flip":
        middle = len(data) // 2
        log.write_bytes(data[:middle] + bytes([data[middle] ^ 0xFF]) + data[middle + 1 :])
    if damage == "file":
        log.unlink()
        (store / "ledger" / "writer.duckdb").write_bytes(b"\0" * 4096)
    report = load(store)
    assert rows(store, "select sum(source_tokens)::bigint, count(*) from current_step") == [(18 + 12 + 15 + 15, 4)]
    assert rows(store, "select count(*) from pair") == [(5,)]
    set_aside = damage in ("flip", "file")
    assert (report.set_aside is not None) == set_aside
    if report.set_aside is not None:
        assert (report.set_aside / "writer.duckdb").exists()  # kept aside, not deleted
    restored = everything(store)
    rebuild(store)
    assert everything(store) == restored


def test_case_reader_while_writer(store: Path) -> None:
    run_dir = shop.write_run(store, "s")
    attempt = shop.start(run_dir)
    writer = LedgerWriter(attempt.steps)
    load(store)
    held = duckdb.connect(str(snapshot(store)), read_only=True)  # a notebook that someone forgot
    seen: list[int] = []
    for number in (1, 2, 3, 4):
        writer.append(shop.step(number, run_id="s"))
        load(store)
        ask = "from training.ledger.store import query; import sys\n"
        ask += "print(query(sys.argv[1], \"select max(step) from step where run_id = 's'\")[1][0][0])"
        done = subprocess.run([sys.executable, "-c", ask, str(store)], capture_output=True, text=True, check=True)
        seen.append(int(done.stdout))
    assert seen == [1, 2, 3, 4]
    assert held.execute("select count(*) from step where run_id = 's'").fetchone() == (0,)  # its own, whole copy
    held.close()
    assert len(publish.published(store / "ledger")) == publish.KEEP
    assert rows(store, "select count(*), count(distinct step) from step where run_id = 's'") == [(4, 4)]


def test_a_load_that_could_not_publish_is_published_by_the_next(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = load(store)
    shop.train(shop.write_run(store, "s"), [shop.step(1)])

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as disk:
        disk.setattr(shutil, "copyfile", full)
        with pytest.raises(LedgerError, match="cannot be published"):
            load(store)
    assert rows(store, "select count(*) from run") == [(1,)]  # readers keep the last one
    again = load(store)
    assert again.files == 0 and again.snapshot != first.snapshot
    assert rows(store, "select count(*) from run") == [(2,)]


def test_a_ledger_that_was_emptied_loses_its_rows(store: Path) -> None:
    load(store)
    (store / "runs" / "r" / "attempts" / "0001" / "steps.jsonl").write_bytes(b"")
    load(store)
    assert rows(store, "select (select count(*) from step), (select count(*) from step_pair)") == [(0, 0)]


def test_writers_queue_for_a_bounded_time(store: Path) -> None:
    load(store)
    with (
        database.sole_writer(store / "ledger", 1),
        pytest.raises(LedgerError, match=r"another process has been loading for more than 0\.2 s"),
    ):
        load(store, wait_s=0.2)
    assert load(store, wait_s=0.2).files == 0


def test_a_program_that_holds_the_writers_file_is_waited_for_and_named(store: Path) -> None:
    load(store)
    hold = "import duckdb, sys; c = duckdb.connect(sys.argv[1]); print('held', flush=True); sys.stdin.readline()"
    other = subprocess.Popen(
        [sys.executable, "-c", hold, str(store / "ledger" / "writer.duckdb")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert other.stdout is not None and other.stdout.readline() == "held\n"
    with pytest.raises(LedgerError, match="is held open by another program"):
        load(store, wait_s=0.2)
    other.communicate("\n")
    assert load(store).files == 0


def test_queries_can_only_read_the_snapshot(store: Path, tmp_path: Path) -> None:
    with pytest.raises(LedgerError, match="load the ledgers first"):
        query(store, "select 1")
    load(store)
    for sql in (
        "delete from step",
        "create table x (i int)",
        f"copy step to '{tmp_path / 'out.csv'}'",
        f"attach '{tmp_path / 'other.duckdb'}'",
        "select * from read_text('/etc/hostname')",
        "set enable_external_access = true",
        "select * from nowhere",
        "selekt",
    ):
        with pytest.raises(LedgerError, match="the query was refused"):
            query(store, sql)
    assert not (tmp_path / "out.csv").exists()
    assert query(store, "select step, loss from step where step = ?", [4]) == (["step", "loss"], [(4, (0.4 + 0.2) / 2)])


def test_a_database_of_a_newer_version_is_left_alone(store: Path) -> None:
    load(store)
    with duckdb.connect(str(store / "ledger" / "writer.duckdb")) as connection:
        connection.execute("insert into migration values (9999, '9999_later')")
    with pytest.raises(LedgerError, match="has migration 9999, this version knows 2"):
        load(store)
    assert rebuild(store).set_aside is not None
    assert rows(store, "select number, name from migration") == [(1, "0001_tables"), (2, "0002_validation")]


def test_a_failed_migration_leaves_no_trace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "migrations").mkdir()
    (tmp_path / "migrations" / "0001_half.sql").write_text("create table half (i int); create table half (i int);")
    monkeypatch.setattr(database, "HERE", tmp_path)
    with duckdb.connect() as connection:
        with pytest.raises(duckdb.CatalogException):
            database.migrate(connection)
        assert connection.execute("select name from (show tables)").fetchall() == [("migration",)]
        assert connection.execute("select count(*) from migration").fetchone() == (0,)


def test_a_view_that_changed_is_made_anew_and_published(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = load(store)
    here = store.parent / "newer"
    shutil.copytree(database.HERE / "migrations", here / "migrations")
    shutil.copytree(database.HERE / "views", here / "views")
    waste = here / "views" / "waste.sql"
    waste.write_text(waste.read_text().replace("as seconds", "as lost_seconds"))
    summary = here / "views" / "run_summary.sql"
    summary.write_text(summary.read_text().replace("sum(seconds) as wasted", "sum(lost_seconds) as wasted"))
    monkeypatch.setattr(database, "HERE", here)
    assert load(store).snapshot != first.snapshot
    assert rows(store, "select count(lost_seconds) from waste") == [(0,)]


def test_every_view_has_a_file_and_every_file_is_a_view() -> None:
    files = {path.stem for path in (database.HERE / "views").glob("*.sql")}
    assert files == set(database.VIEWS) and len(database.VIEWS) == len(files)


def test_an_empty_store_is_an_empty_database(tmp_path: Path) -> None:
    report = load(tmp_path)
    assert isinstance(report, LoadReport) and report.rows == 0
    assert rows(tmp_path, "select count(*) from run_summary") == [(0,)]


def test_a_store_that_cannot_be_written_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "ledger").write_text("a file, not a folder")
    with pytest.raises(LedgerError, match="cannot be written"):
        load(tmp_path)
