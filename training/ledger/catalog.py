"""What lies in dataset folders as Arrow tables: the manifest, its shards, its pairs without tokens, the quarantine.

A pair's row keeps lengths, never ids. Shards are mapped and read batch by batch, so memory does not grow with them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from training.errors import LedgerError

Integers = npt.NDArray[np.int64]

MANIFEST = "manifest.json"
PARTS = ("prompt", "chosen", "rejected")
BATCHES = 64
"""Record batches of a shard that are turned into rows at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedFolder:
    """A dataset folder whose manifest was read."""

    path: Path
    fingerprint: str
    manifest: dict[str, Any]


def read_manifest(folder: Path) -> PreparedFolder:
    """Read a dataset's manifest.

    Raises:
        LedgerError: there is none, or it is not a dataset's.
    """
    path = folder / MANIFEST
    try:
        manifest = json.loads(path.read_bytes())
        return PreparedFolder(path=folder, fingerprint=manifest["fingerprint"], manifest=manifest)
    except OSError as error:
        raise LedgerError(f"{path}: cannot be read ({error.strerror}); prepare the dataset again") from None
    except (ValueError, KeyError, TypeError) as error:
        raise LedgerError(f"{path}: is not a dataset's manifest: {error!r}; prepare the dataset again") from None


def dataset_tables(folder: PreparedFolder, named: str) -> Iterator[tuple[str, pa.Table]]:
    """(table, rows) of one dataset, `pair` in pieces; `named` is the path that the database keeps.

    Raises:
        LedgerError: a shard or the quarantine is not as the manifest says.
    """
    manifest, dataset = folder.manifest, folder.fingerprint
    try:
        yield (
            "dataset",
            _one(
                dataset=dataset,
                path=named,
                **{name: manifest["inputs"].get(name) for name in ("tokenizer", "template", "recipe")},
                **{name: manifest["counts"][name] for name in ("rows", "pairs", "quarantined")},
                **{f"{part}_tokens": manifest["tokens"][part] for part in ("prompt", "chosen", "rejected")},
            ),
        )
        for number, shard in enumerate(manifest["shards"]):
            facts = {name: shard[name] for name in ("file", "rows", "tokens", "bytes", "digest")}
            yield "shard", _one(dataset=dataset, shard=number, **facts)
            for pairs in _pairs(folder.path / shard["file"], dataset, number):
                yield "pair", pairs
        yield from _quarantine(folder.path / manifest["quarantine"]["file"], dataset)
    except (KeyError, TypeError, AttributeError) as error:
        raise LedgerError(f"{folder.path / MANIFEST}: is not a dataset's manifest: {error!r}") from None


def _pairs(path: Path, dataset: str, number: int) -> Iterator[pa.Table]:
    try:
        with pa.memory_map(str(path)) as source:
            reader, start = pa.ipc.open_file(source), 0
            for first in range(0, reader.num_record_batches, BATCHES):
                tables: list[pa.Table] = []
                for i in range(first, min(first + BATCHES, reader.num_record_batches)):
                    rows = reader.get_batch(i)
                    tables.append(_lengths(rows, dataset, number, start))
                    start += rows.num_rows
                yield pa.concat_tables(tables)
    except (OSError, pa.ArrowInvalid) as error:
        raise LedgerError(f"{path}: is not a whole shard: {error}; prepare the dataset again") from None


def _lengths(rows: pa.RecordBatch, dataset: str, shard: int, start: int) -> pa.Table:
    offsets = {part: rows.column(f"{part}_ids").offsets.to_numpy() for part in PARTS}
    lengths = {part: np.diff(places).astype(np.int64) for part, places in offsets.items()}
    return pa.table(
        {
            "dataset": pa.repeat(dataset, rows.num_rows),
            "shard": pa.array(np.full(rows.num_rows, shard, np.int64)),
            "row": pa.array(np.arange(start, start + rows.num_rows)),
            **{name: rows.column(name) for name in ("pair_id", "source", "locator")},
            **{f"{part}_tokens": lengths[part] for part in PARTS},
            **{f"{part}_loss_tokens": _supervised(rows.column(f"{part}_mask"), lengths[part]) for part in PARTS[1:]},
        }
    )


def _supervised(mask: pa.ListArray, lengths: Integers) -> Integers:
    """True values of each row's mask; all of its completion where it has none."""
    seen = np.concatenate([[0], np.cumsum(mask.values.to_numpy(zero_copy_only=False), dtype=np.int64)])
    return np.where(mask.is_null().to_numpy(zero_copy_only=False), lengths, np.diff(seen[mask.offsets.to_numpy()]))


def _quarantine(path: Path, dataset: str) -> Iterator[tuple[str, pa.Table]]:
    names = ("source", "locator", "reason", "detail")
    with path.open("rb") as file:
        rows = [json.loads(line) for line in file]
    if rows:
        columns = {name: pa.array([row[name] for row in rows], pa.string()) for name in names}
        yield "quarantine", pa.table({"dataset": pa.repeat(dataset, len(rows)), **columns})


def _one(**values: Any) -> pa.Table:
    return pa.table({name: [value] for name, value in values.items()})
