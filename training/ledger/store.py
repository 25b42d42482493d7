"""DuckDB from ledgers and manifests: loaded when asked, published for readers, rebuilt when lost.

Loading is idempotent and reads what is new alone: a file is known by the digest of what was loaded of it, and a ledger
that has grown is read from where it ended. Of two lines for one step in an attempt's ledger the later one stands. A
file that cannot be read as declared is refused by name, and the others are loaded nevertheless. Rows go through Arrow,
never one by one: benchmarks/results says how fast.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import duckdb

from training.errors import LedgerError
from training.ledger.database import DAMAGE, open_writer, set_aside, sole_writer
from training.ledger.facts import RUN
from training.ledger.loader import Loader, LoadReport
from training.ledger.publish import current, open_snapshot, publish

log = logging.getLogger(__name__)


def load(store_root: str | Path, *, wait_s: float = 30.0) -> LoadReport:
    """Bring the database up to date with the store's run and dataset folders, and publish it.

    Raises:
        LedgerError: another loader holds the database for more than `wait_s` seconds; or files were refused, in which
            case all others are loaded and published and the message names each refused file, line and field.
    """
    return _load(Path(store_root), wait_s, anew=False)


def rebuild(store_root: str | Path, *, wait_s: float = 30.0) -> LoadReport:
    """Build the database from nothing but ledgers and manifests, and publish it; the old one is set aside.

    Raises:
        LedgerError: as `load`.
    """
    return _load(Path(store_root), wait_s, anew=True)


def snapshot(store_root: str | Path) -> Path:
    """The newest published database, a plain DuckDB file that any reader may open read-only.

    Raises:
        LedgerError: nothing has been loaded yet.
    """
    return current(Path(store_root) / "ledger")


def query(
    store_root: str | Path, sql: str, params: Sequence[Any] | Mapping[str, Any] = ()
) -> tuple[list[str], list[tuple[Any, ...]]]:
    """Column names and rows of one query of the newest published database; it can read nothing else, nor write.

    Raises:
        LedgerError: nothing has been loaded yet, or DuckDB refuses the query.
    """
    with open_snapshot(Path(store_root) / "ledger") as connection:
        try:
            found = connection.execute(sql, dict(params) if isinstance(params, Mapping) else list(params))
            return [name for name, *_ in found.description or ()], found.fetchall()
        except duckdb.Error as error:
            raise LedgerError(f"the query was refused: {str(error).strip()}") from None


def runs(store_root: str | Path) -> list[str]:
    """The runs that are loaded, the newest first.

    Raises:
        LedgerError: nothing has been loaded yet.
    """
    return [name for (name,) in query(store_root, "select run_id from run order by created_at desc, run_id")[1]]


def run_named(store_root: str | Path, name: str) -> str:
    """The one loaded run of this id, or whose id begins so.

    Raises:
        LedgerError: there is none, or more than one.
    """
    known = runs(store_root)
    found = [run_id for run_id in known if run_id == name] or [one for one in known if one.startswith(name)]
    if len(found) != 1:
        choice = ", ".join((found or known)[:5]) or "none yet; train first"
        raise LedgerError(f"{store_root} has {len(found)} runs named {name}; there are: {choice}")
    return found[0]


def _load(root: Path, wait_s: float, *, anew: bool) -> LoadReport:
    folder = root / "ledger"
    with sole_writer(folder, wait_s):
        report = LoadReport()
        if anew and (folder / "writer.duckdb").exists():
            report.set_aside = set_aside(folder)
        try:
            stale = _fill(root, report, wait_s)
        except DAMAGE as error:
            report = LoadReport(set_aside=set_aside(folder))
            log.warning("%s: the database is damaged and is built again: %s", report.set_aside, error)
            try:
                stale = _fill(root, report, wait_s)
            except DAMAGE as again:
                raise LedgerError(f"{folder}: a new database cannot be written either: {again}") from None
        if stale:
            publish(folder)
        report.snapshot = current(folder)
    if report.refused:
        raise LedgerError("not loaded, all else is: " + "; ".join(report.refused))
    return report


def _fill(root: Path, report: LoadReport, wait_s: float) -> bool:
    """Load everything; True when the published snapshot is not what the database now is."""
    connection = open_writer(root / "ledger", wait_s)
    try:
        loader = Loader(root, connection, report)
        for run_dir in sorted(path.parent for path in (root / "runs").glob(f"*/{RUN}")):
            loader.run(run_dir)
        loader.datasets()
        connection.execute("checkpoint")
        return report.set_aside is not None or _state(connection) != _published_state(root / "ledger")
    finally:
        connection.close()


def _published_state(folder: Path) -> list[tuple[Any, ...]] | None:
    try:
        with open_snapshot(folder) as connection:
            return _state(connection)
    except (LedgerError, duckdb.Error):  # none yet, or one of another version
        return None


def _state(connection: duckdb.DuckDBPyConnection) -> list[tuple[Any, ...]]:
    """What decides a database's content: the files that were loaded, the schema and the views."""
    return connection.execute(
        "select path, digest, cut_line from loaded union all select name, null, number from migration "
        "union all select name, digest, null from view_file order by all"
    ).fetchall()
