"""Shards: tokenized pairs as Arrow files that are mapped, not read.

A shard is an Arrow IPC file cut by bytes of ids, so that its 32-bit list offsets cannot overflow; every shard has the
same schema, whose metadata says which tokenizer, template, recipe and source made it. A mask stands only where not all
of a completion is supervised. `prompt_key` is a hash of the prompt's ids, kept so that a plan over millions of pairs
reads columns and never a row. Decision: docs/decisions/0002-shard-format.md.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from blake3 import blake3

from training.data.fingerprint import file_fingerprint
from training.data.manifest import AGAIN, FORMAT, Manifest, StoredFile, read_manifest
from training.data.tokenize import TokenizedPair
from training.errors import DatasetError

PARTS = ("prompt", "chosen", "rejected")
SHARD_BYTES = 64 << 20
"""Ids of one shard, in bytes; a pair that is larger stands alone."""

IDS, MASK = pa.list_(pa.int32()), pa.list_(pa.bool_())
SCHEMA = pa.schema(
    [
        pa.field("pair_id", pa.string(), nullable=False),
        pa.field("source", pa.string(), nullable=False),
        pa.field("locator", pa.string(), nullable=False),
        pa.field("prompt_ids", IDS, nullable=False),
        pa.field("chosen_ids", IDS, nullable=False),
        pa.field("rejected_ids", IDS, nullable=False),
        pa.field("chosen_mask", MASK),
        pa.field("rejected_mask", MASK),
        pa.field("prompt_cut", pa.int32(), nullable=False),
        pa.field("chosen_cut", pa.int32(), nullable=False),
        pa.field("rejected_cut", pa.int32(), nullable=False),
        pa.field("prompt_key", pa.uint64(), nullable=False),
    ]
)

Lengths = npt.NDArray[np.int64]


def to_batch(pairs: Sequence[TokenizedPair]) -> pa.RecordBatch:
    """Pairs as rows of a shard."""
    names = [name for name in SCHEMA.names if name != "prompt_key"]
    columns = {name: pa.array([getattr(pair, name) for pair in pairs], SCHEMA.field(name).type) for name in names}
    keys = [_key(pair.prompt_ids) for pair in pairs]
    return pa.RecordBatch.from_pydict({**columns, "prompt_key": pa.array(keys, pa.uint64())}, schema=SCHEMA)


def _key(ids: Sequence[int]) -> int:
    return int.from_bytes(blake3(np.asarray(ids, "<i4").tobytes()).digest(8), "little")


class ShardWriter:
    """Writes batches of rows, in order, to `shard-00000.arrow` and so on, each at most `limit` bytes of ids.

    Shards are a function of the rows and of where the batches end, so the same chunks give the same bytes, and so do
    the rows that follow some `finished` shards.
    """

    def __init__(
        self,
        folder: Path,
        inputs: Mapping[str, str],
        *,
        limit: int = SHARD_BYTES,
        finished: Sequence[StoredFile] = (),
    ) -> None:
        metadata = {"pairledger.format": str(FORMAT), **{f"pairledger.{name}": value for name, value in inputs.items()}}
        self._schema = SCHEMA.with_metadata(metadata)
        self._folder = folder
        self._limit = limit
        self._open: tuple[Path, Any, Any] | None = None
        self._bytes = self._rows = self._tokens = 0
        self.files = list(finished)

    def add(self, batch: pa.RecordBatch) -> list[tuple[StoredFile, int]]:
        """Take rows of `SCHEMA`, cut where a shard is full.

        Returns:
            Each shard that was finished on the way, and the row of the batch with which the next one begins.
        """
        finished: list[tuple[StoredFile, int]] = []
        tokens = np.sum([lengths(batch.column(f"{part}_ids")) for part in PARTS], axis=0)
        start = 0
        while start < batch.num_rows:
            room = self._limit - self._bytes
            fits = int(np.searchsorted(np.cumsum(tokens[start:]) * 4, room, side="right"))
            if fits == 0 and self._rows:
                self._close()
                finished.append((self.files[-1], start))
                continue
            end = start + max(fits, 1)
            self._write(batch.slice(start, end - start), int(tokens[start:end].sum()))
            start = end
        return finished

    def finish(self) -> tuple[StoredFile, ...]:
        """Close the last shard; gives all of them."""
        self._close()
        return tuple(self.files)

    def close(self) -> None:
        """Let go of a shard that will not be finished."""
        if self._open is not None:
            self._open[1].close()
            self._open = None

    def _write(self, rows: pa.RecordBatch, tokens: int) -> None:
        if self._open is None:
            path = self._folder / f"shard-{len(self.files):05d}.arrow"
            sink = pa.OSFile(str(path), "wb")
            self._open = path, sink, pa.ipc.new_file(sink, self._schema)
        self._open[2].write_batch(pa.RecordBatch.from_arrays(rows.columns, schema=self._schema))
        self._rows += rows.num_rows
        self._tokens += tokens
        self._bytes += 4 * tokens

    def _close(self) -> None:
        if self._open is None:
            return
        path, sink, writer = self._open
        writer.close()
        sink.close()
        self.files.append(
            StoredFile(
                file=path.name,
                rows=self._rows,
                tokens=self._tokens,
                bytes=path.stat().st_size,
                digest=file_fingerprint(path),
            )
        )
        self._open = None
        self._bytes = self._rows = self._tokens = 0


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PairColumns:
    """Places and lengths of a dataset's pairs in order; every array holds one entry a pair.

    `source_code` is a code into `sources`; `chosen_loss` and `rejected_loss` count supervised tokens.
    """

    sources: tuple[str, ...]
    source_code: npt.NDArray[np.int32]
    shard: npt.NDArray[np.int32]
    row: npt.NDArray[np.int32]
    prompt: npt.NDArray[np.int32]
    chosen: npt.NDArray[np.int32]
    rejected: npt.NDArray[np.int32]
    chosen_loss: npt.NDArray[np.int32]
    rejected_loss: npt.NDArray[np.int32]
    prompt_key: npt.NDArray[np.uint64]
    pair_id: pa.ChunkedArray
    locator: pa.ChunkedArray


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Dataset:
    """A committed dataset; its shards are mapped when they are first asked for."""

    path: Path
    manifest: Manifest
    _tables: dict[int, pa.Table] = field(default_factory=dict[int, pa.Table])

    @property
    def fingerprint(self) -> str:
        """`ds1:…` of the ordered rows."""
        return self.manifest.fingerprint

    @property
    def inputs(self) -> dict[str, str]:
        """Fingerprints of source, tokenizer, template and recipe."""
        return dict(self.manifest.inputs)

    @property
    def max_tokens(self) -> int | None:
        """The limit that each side keeps to."""
        return self.manifest.max_tokens

    def table(self, shard: int) -> pa.Table:
        """The rows of one shard.

        Raises:
            DatasetError: it is no shard of this dataset.
        """
        if shard not in self._tables:
            self._tables[shard] = _map(self.path / self.manifest.shards[shard].file, self.manifest)
        return self._tables[shard]

    def take(self, shard: int, row: int) -> TokenizedPair:
        """One pair."""
        values: dict[str, Any] = self.table(shard).slice(row, 1).to_pylist()[0]
        del values["prompt_key"]
        return TokenizedPair(**values)

    def columns(self) -> PairColumns:
        """Everything about the pairs but their ids, without touching a row."""
        tables = [self.table(number) for number in range(len(self.manifest.shards))]
        table = pa.concat_tables(tables)
        coded = table["source"].combine_chunks().dictionary_encode()
        counts = {part: _joined(table[f"{part}_ids"], lengths) for part in PARTS}
        supervised = {side: _joined(table[f"{side}_mask"], true_values) for side in PARTS[1:]}
        numbers = {name: values.astype(np.int32) for name, values in counts.items()}
        losses = {
            f"{side}_loss": np.where(values < 0, counts[side], values).astype(np.int32)
            for side, values in supervised.items()
        }
        return PairColumns(
            sources=tuple(coded.dictionary.to_pylist()),
            source_code=coded.indices.to_numpy().astype(np.int32),
            shard=np.repeat(np.arange(len(tables), dtype=np.int32), [len(table) for table in tables]),
            row=np.concatenate([np.arange(len(table), dtype=np.int32) for table in tables]),
            **numbers,
            **losses,
            prompt_key=table["prompt_key"].to_numpy(),
            pair_id=table["pair_id"],
            locator=table["locator"],
        )


def open_dataset(path: Path, *, verify: bool = True) -> Dataset:
    """Open a committed dataset; `verify` hashes every file of it (about a gigabyte a second).

    Raises:
        DatasetError: it is not there, not finished, cut, altered, or of another format; the file is named.
    """
    manifest = read_manifest(path)
    if verify:
        for stored in (*manifest.shards, manifest.quarantine):
            stored.check(path)
    return Dataset(path=path, manifest=manifest)


def lengths(lists: pa.ListArray) -> Lengths:
    """int64[rows]: length of each list, -1 of a null."""
    counted = np.diff(lists.offsets.to_numpy()).astype(np.int64)
    return np.where(lists.is_null().to_numpy(zero_copy_only=False), -1, counted)


def true_values(masks: pa.ListArray) -> Lengths:
    """int64[rows]: true values of each mask, -1 where there is none."""
    seen = np.concatenate([[0], np.cumsum(masks.values.to_numpy(zero_copy_only=False), dtype=np.int64)])
    counted = np.diff(seen[masks.offsets.to_numpy()])
    return np.where(masks.is_null().to_numpy(zero_copy_only=False), -1, counted)


def _joined(column: pa.ChunkedArray, of: Any) -> Lengths:
    return np.concatenate([np.empty(0, np.int64), *(of(chunk) for chunk in column.chunks)])


def _map(path: Path, manifest: Manifest) -> pa.Table:
    try:
        reader = pa.ipc.open_file(pa.memory_map(str(path)))
        table = reader.read_all()
    except (OSError, pa.ArrowInvalid) as error:
        raise DatasetError(f"{path}: is not a whole shard ({error}); {AGAIN}") from None
    found = {key.decode(): value.decode() for key, value in (table.schema.metadata or {}).items()}
    wanted = {f"pairledger.{name}": value for name, value in manifest.inputs.items()}
    if not table.schema.equals(SCHEMA) or any(found.get(name) != value for name, value in wanted.items()):
        raise DatasetError(f"{path}: belongs to another dataset or another format version; {AGAIN}")
    return table
