"""The writer's database: one process at a time, migrated when it is opened, set aside when it is damaged.

`ledger/writer.duckdb` is private to loading; readers use the published snapshots (`publish`). DuckDB lets one process
open a file for writing and tells all others to go away at once, so writers queue at a file lock beside it. The file is
no source of truth: one that DuckDB cannot open is moved to `ledger/damaged/`, never deleted, and built again from the
ledgers and manifests.
"""

from __future__ import annotations

import fcntl
import time
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path

import duckdb
from blake3 import blake3

from training.errors import LedgerError

HERE = Path(__file__).parent
VIEWS = (
    *("current_step", "current_step_source", "current_step_pair", "waste", "step_rates", "source_density"),
    *(
        "run_summary",
        "pair_history",
        "consumption",
        "unconsumed",
        "plan_vs_actual",
        "discrepancy",
        "current_validation",
    ),
)
"""In this order, since DuckDB binds a view to the views it reads when it is made."""


class Damaged(Exception):
    """DuckDB cannot open the file, or cannot replay its log."""


DAMAGE = (Damaged, duckdb.IOException, duckdb.InternalException, duckdb.SerializationException, duckdb.FatalException)
"""What a damaged database raises, when it is opened or later, when a damaged block is read."""


@contextmanager
def sole_writer(folder: Path, wait_s: float) -> Generator[None]:
    """Hold the ledger folder's lock, made if need be; another loader is waited for.

    Raises:
        LedgerError: it is still held after `wait_s` seconds, or the folder cannot be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = (folder / "writer.lock").open("a")
    except OSError as error:
        raise LedgerError(f"{folder}: cannot be written ({error.strerror})") from None
    with lock:
        end = time.monotonic() + wait_s
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > end:
                    raise LedgerError(
                        f"{folder}: another process has been loading for more than {wait_s:g} s; try again when it is "
                        "done (nothing is lost: what a run records stands in its own folder)"
                    ) from None
                time.sleep(0.05)
        yield


def open_writer(folder: Path, wait_s: float) -> duckdb.DuckDBPyConnection:
    """Open the writer's database, with all migrations and views. The caller holds the lock.

    Raises:
        LedgerError: another program holds the file open, or a newer version wrote it.
        Damaged: the file or its log cannot be read.
    """
    path, end = folder / "writer.duckdb", time.monotonic() + wait_s
    while True:
        try:
            connection = duckdb.connect(str(path))
            break
        except duckdb.Error as error:
            if "Could not set lock" not in str(error):
                raise Damaged(str(error)) from error
            if time.monotonic() > end:
                raise LedgerError(
                    f"{path}: is held open by another program; close it there, and read ledger/current.duckdb instead: "
                    f"{str(error).splitlines()[0]}"
                ) from None
            time.sleep(0.1)
    try:
        connection.execute("set timezone = 'UTC'")
        migrate(connection)
    except BaseException:
        connection.close()
        raise
    return connection


def migrate(connection: duckdb.DuckDBPyConnection) -> None:
    """Apply the numbered migrations that are missing, each recorded in its own transaction, and make the views.

    Raises:
        LedgerError: the database has a migration that this version does not know.
    """
    connection.execute("create table if not exists migration (number bigint not null, name varchar not null)")
    done = {number for (number,) in connection.execute("select number from migration").fetchall()}
    files = {int(path.name[:4]): path for path in sorted((HERE / "migrations").glob("[0-9]*.sql"))}
    if done - files.keys():
        raise LedgerError(
            f"the database has migration {max(done)}, this version knows {max(files)}; use the newer pairledger, "
            "or rebuild the database with this one"
        )
    for number in sorted(files.keys() - done):
        with transaction(connection):
            connection.execute(files[number].read_text(encoding="utf-8"))
            connection.execute("insert into migration values (?, ?)", [number, files[number].stem])
    _make_views(connection)


def _make_views(connection: duckdb.DuckDBPyConnection) -> None:
    """Make all views anew when one of their files is not what they were made from."""
    texts = [(HERE / "views" / f"{name}.sql").read_text(encoding="utf-8") for name in VIEWS]
    wanted = [(name, blake3(text.encode()).hexdigest()) for name, text in zip(VIEWS, texts, strict=True)]
    connection.execute("create table if not exists view_file (name varchar not null, digest varchar not null)")
    if connection.execute("select name, digest from view_file order by rowid").fetchall() != wanted:
        with transaction(connection):
            for text in texts:
                connection.execute(text)
            connection.execute("delete from view_file")
            connection.executemany("insert into view_file values (?, ?)", wanted)


@contextmanager
def transaction(connection: duckdb.DuckDBPyConnection) -> Generator[None]:
    """Everything inside stands, or nothing does."""
    connection.begin()
    try:
        yield
    except BaseException:
        with suppress(duckdb.Error):  # a damaged database cannot even do that; the first error says more
            connection.rollback()
        raise
    connection.commit()


def set_aside(folder: Path) -> Path:
    """Move the writer's database and its log to a folder of their own; returns that folder."""
    damaged = folder / "damaged"
    damaged.mkdir(exist_ok=True)
    number = max((int(path.name) for path in damaged.iterdir() if path.name.isdigit()), default=0) + 1
    place = damaged / f"{number:04d}"
    place.mkdir()
    for path in folder.glob("writer.duckdb*"):
        path.rename(place / path.name)
    return place
