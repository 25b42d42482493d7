"""The database itself: damaged, migrated, of another version, with views that changed."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import duckdb
import pytest

from tests.training.ledger.shop import everything, rows
from training.errors import LedgerError
from training.ledger import database
from training.ledger.store import load, rebuild


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


@pytest.mark.parametrize(
    ("damage", "amount"),
    [
        ("none", 0),
        ("cut", 1),
        ("cut", 7),
        ("cut", 900),
        *(("flip", at) for at in (0.05, 0.3, 0.5, 0.7, 0.95)),
        ("file", 0),
    ],
)
def test_case_wal_after_kill(store: Path, damage: str, amount: float) -> None:
    log = write_wal(store)
    data = log.read_bytes()
    if damage == "cut":
        log.write_bytes(data[: -int(amount)])
    if damage == "flip":
        at = int(len(data) * amount)
        log.write_bytes(data[:at] + bytes([data[at] ^ 0xFF]) + data[at + 1 :])
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
