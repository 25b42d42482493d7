"""Read-only snapshots of the database, behind one link.

DuckDB refuses readers while a process writes, and a writer while anyone reads. So readers never see the writer's file:
each load publishes a copy of it under a new name, and moves the link `ledger/current.duckdb` to it in one step. A
reader keeps the copy it opened, a new one gets the newest; the last three stay. Renaming over one fixed name instead
would leave the old copy's write-ahead log lying beside the new one. Cost: one copy of the file a load.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import duckdb

from training.errors import LedgerError
from training.ledger.facts import sync_folder

KEEP = 3
CURRENT = "current.duckdb"


def publish(folder: Path) -> Path:
    """Publish the closed, checkpointed `writer.duckdb` as the newest snapshot; returns its path.

    Raises:
        LedgerError: the disk refuses the copy; readers keep the snapshot they have.
    """
    try:
        return _publish(folder, folder / "snapshots")
    except OSError as error:
        raise LedgerError(
            f"{folder}: the loaded database cannot be published ({error.strerror}); readers keep the last snapshot. "
            "Free the disk and load again"
        ) from None


def _publish(folder: Path, snapshots: Path) -> Path:
    snapshots.mkdir(exist_ok=True)
    for leftover in snapshots.glob(".new-*"):
        leftover.unlink()
    number = max((int(path.stem) for path in published(folder)), default=0) + 1
    staged, snapshot = snapshots / f".new-{number}", snapshots / f"{number:08d}.duckdb"
    shutil.copyfile(folder / "writer.duckdb", staged)
    with staged.open("rb") as file:
        os.fsync(file.fileno())
    staged.chmod(0o444)
    staged.rename(snapshot)
    sync_folder(snapshots)
    link = folder / f".{CURRENT}.new"
    link.unlink(missing_ok=True)
    link.symlink_to(snapshot.relative_to(folder))
    link.replace(folder / CURRENT)
    sync_folder(folder)
    for old in published(folder)[:-KEEP]:
        old.unlink()
    return snapshot


def published(folder: Path) -> list[Path]:
    """All snapshots, the newest last."""
    return sorted((folder / "snapshots").glob("[0-9]*.duckdb"))


def current(folder: Path) -> Path:
    """The snapshot that the link names.

    Raises:
        LedgerError: nothing has been loaded yet.
    """
    try:
        return (folder / CURRENT).resolve(strict=True)
    except FileNotFoundError:
        raise LedgerError(f"{folder / CURRENT}: is not there; load the ledgers first") from None


def open_snapshot(folder: Path) -> duckdb.DuckDBPyConnection:
    """Open the newest snapshot for reading alone: nothing can be written, neither to it nor to other files.

    Raises:
        LedgerError: nothing has been loaded yet, or another program holds the snapshot open for writing.
    """
    for _ in range(KEEP):
        snapshot = current(folder)
        try:
            connection = duckdb.connect(str(snapshot), read_only=True, config={"enable_external_access": "false"})
        except duckdb.IOException as error:
            if snapshot.exists():  # else it was retired since the link was read; a newer one is there
                raise LedgerError(
                    f"{snapshot}: cannot be opened ({str(error).splitlines()[0]}); where another program holds it "
                    "open for writing, close it there, or load: that publishes another"
                ) from None
        else:
            connection.execute("set timezone = 'UTC'; set lock_configuration = true")
            return connection
    raise LedgerError(f"{folder}: snapshots are retired faster than one can be opened")
