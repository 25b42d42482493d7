"""Where the store keeps what assets make, and how an asset finds what another one made.

Folders are named by content, so a partition's folder may hold several versions; which one is current is what Dagster's
last materialization says. Nothing is found by time or by name.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import dagster as dg

from assets.partitions import Drop, folder_name
from training.config import SourceConfig
from training.data.sources import SourceSpec
from training.errors import DatasetError
from training.ledger.loader import LoadReport
from training.ledger.store import load, query


class ShardStore(dg.ConfigurableResource):
    """The one folder below which preparation and training write."""

    root: str

    @property
    def path(self) -> Path:
        """The root."""
        return Path(self.root)

    def drop(self, kind: str, drop: Drop) -> Path:
        """Folder of the versions of a drop's `pairs` or `datasets`."""
        return self.path / kind / folder_name(drop.source) / drop.day

    def plan(self, fingerprint: str) -> Path:
        """Folder of a step plan."""
        return self.path / "plans" / fingerprint.replace(":", "-")

    def name(self, path: Path) -> str:
        """A path as metadata holds it: relative to the root, so that a store may be moved."""
        return path.resolve().relative_to(self.path.resolve()).as_posix()


class TokenLedger(dg.ConfigurableResource):
    """The DuckDB of the store's ledgers and manifests: loaded by one writer, read from published snapshots."""

    root: str

    def load(self) -> LoadReport:
        """Bring it up to date.

        Raises:
            LedgerError: a file was refused (all others are loaded), or another loader holds the database.
        """
        return load(self.root)

    def query(self, sql: str) -> tuple[list[str], list[tuple[Any, ...]]]:
        """Column names and rows of a query of the newest snapshot.

        Raises:
            LedgerError: nothing has been loaded yet, or the query is refused.
        """
        return query(self.root, sql)


@dataclass(frozen=True, slots=True, kw_only=True)
class Made:
    """The current version of one partition of an asset."""

    fingerprint: str
    path: str
    """Relative to the store's root."""
    metadata: Mapping[str, dg.MetadataValue]


def current(instance: dg.DagsterInstance, asset: str, partitions: Iterable[str]) -> dict[str, Made]:
    """The last materialization of each of these partitions that has one. Two queries, however many there are."""
    key, wanted = dg.AssetKey(asset), set(partitions)
    if not wanted:  # Dagster takes no partitions for all of them
        return {}
    newest = instance.get_latest_storage_id_by_partition(key, dg.DagsterEventType.ASSET_MATERIALIZATION, wanted)
    if not newest:
        return {}
    records = instance.fetch_materializations(
        dg.AssetRecordsFilter(asset_key=key, storage_ids=list(newest.values())), limit=len(newest)
    ).records
    return {str(record.partition_key): _made(record) for record in records}


def made(instance: dg.DagsterInstance, asset: str, partition: str) -> Made:
    """The current version of one partition.

    Raises:
        DatasetError: it was never materialised.
    """
    found = current(instance, asset, [partition])
    if partition not in found:
        raise DatasetError(f"{asset} has no partition {partition} yet; materialise it first")
    return found[partition]


def _made(record: dg.EventLogRecord) -> Made:
    event = record.event_log_entry.asset_materialization
    assert event is not None
    path = event.metadata.get("path")
    return Made(
        fingerprint=(event.tags or {}).get("dagster/data_version", ""),
        path=str(path.value) if path else "",
        metadata=event.metadata,
    )


def source_spec(drop: Drop, config: SourceConfig) -> SourceSpec:
    """How a drop's files are read.

    Raises:
        ConfigError: the source has no drop on this day.
    """
    return SourceSpec(name=drop.source, inputs=drop.files(config), format=config.format, mapping=dict(config.map))
