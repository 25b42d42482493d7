"""A source: named files of preference rows, opened in sorted order, read in chunks.

`open_source` reads every byte once, for the fingerprint, and the first rows of every file, to tell the format; nothing
is prepared before a missing or unreadable file is known. `chunks` then reads the rows again without looking into them,
and `parse`, which costs the time, is left to workers. Memory is bounded by a chunk (512 rows or 8 MB) for any input,
as long as a single row fits.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import chain, islice
from typing import Any

import pyarrow as pa

from training.data import hub
from training.data.chunk import RawChunk, parse, record_of, rename, row_at
from training.data.files import CutShort, SourceFile, blocks, find, opened
from training.data.fingerprint import bytes_fingerprint, source_fingerprint, stream_fingerprint
from training.data.formats import FORMATS, Record, columns_of, detect
from training.data.pair import Refused
from training.data.readers import Row, batches, csv_rows, json_file, json_lines, slices
from training.errors import SourceError

__all__ = ["RawChunk", "Source", "SourceSpec", "chunks", "open_source", "parse"]

SAMPLE = 64
"""Rows of each file that the format is told by."""

CHUNK_BYTES = 8 << 20

TEXT_READERS = {"lines": json_lines, "json": json_file, "csv": csv_rows}


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceSpec:
    """Where a source's rows lie and how they are to be read."""

    name: str
    inputs: tuple[str, ...]
    """Paths, globs, folders, fsspec URLs, or `hf://NAME@REVISION`."""
    format: str = "auto"
    mapping: Mapping[str, str] = field(default_factory=dict[str, str])
    """Wanted column -> the column's name in the files."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """A dataset that `datasets` loaded; stands among the files by its name."""

    name: str
    data: Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """An opened source."""

    spec: SourceSpec
    files: tuple[SourceFile | Table, ...]
    """Sorted by name."""
    format: str
    """A name of `FORMATS`."""
    ignored_columns: tuple[str, ...]
    """Columns of the sampled rows that the format does not read, by their names in the files."""
    fingerprint: str
    """`src1:…` of the decompressed bytes of the files in order, the format and the mapping."""


def open_source(spec: SourceSpec) -> Source:
    """Find a source's files, tell their format, hash their content.

    Raises:
        SourceError: a file is missing or unreadable, there is no row, or no one format fits.
    """
    hubs = [hub.load(spec.name, given) for given in spec.inputs if hub.is_hub(given)]
    found = find(spec.name, [given for given in spec.inputs if not hub.is_hub(given)])
    tables = [Table(name=name, data=data) for name, data in hubs]
    files = tuple(sorted((*found, *tables), key=lambda file: file.name))
    sample = [record for file in files for record in _sample(file)]
    if not sample:
        names = ", ".join(file.name for file in files[:5]) or "no input at all"
        raise SourceError(f"source {spec.name}: no row can be read from {names}; a source must have rows")
    _check_mapping(spec, columns_of(sample))
    mapped = [rename(record, spec.mapping) for record in sample]
    form = detect(mapped, name=spec.name, asked=spec.format, mapping=spec.mapping)
    shapes = {tuple(record) for record in mapped}
    read = {spec.mapping.get(name, name) for columns in shapes for name in form.reads(columns)}
    return Source(
        spec=spec,
        files=files,
        format=form.name,
        ignored_columns=tuple(name for name in columns_of(sample) if name not in read),
        fingerprint=source_fingerprint([_content(file) for file in files], form.name, spec.mapping),
    )


def chunks(source: Source, rows: int = 512) -> Iterator[RawChunk]:
    """The source's rows in order, at most `rows` at a time, never of two files in one chunk.

    Raises:
        SourceError: a file cannot be read any more, or is broken at a place from which its rows cannot be told apart.
    """
    for file in source.files:
        kind = file.kind if isinstance(file, SourceFile) else "hub"
        parts = _text_chunks(file, rows) if kind in TEXT_READERS else _batch_chunks(file, rows, source.ignored_columns)
        for locators, content in parts:
            yield RawChunk(
                source=source.spec.name,
                format=source.format,
                mapping=dict(source.spec.mapping),
                kind=kind,
                locators=locators,
                rows=content,
            )


def _text_chunks(file: SourceFile | Table, rows: int) -> Iterator[tuple[tuple[str, ...], tuple[Row, ...]]]:
    assert isinstance(file, SourceFile)
    held: list[tuple[str, Row]] = []
    size = 0
    for where, row in TEXT_READERS[file.kind](file):
        held.append((where, row))
        size += sum(map(len, row.values())) if isinstance(row, dict) else len(row) if isinstance(row, bytes) else 0
        if len(held) >= rows or size >= CHUNK_BYTES:
            yield _unzip(held)
            held, size = [], 0
    if held:
        yield _unzip(held)


def _unzip(held: list[tuple[str, Row]]) -> tuple[tuple[str, ...], tuple[Row, ...]]:
    return tuple(where for where, _ in held), tuple(row for _, row in held)


def _batch_chunks(
    file: SourceFile | Table, rows: int, ignored: tuple[str, ...]
) -> Iterator[tuple[tuple[str, ...], bytes]]:
    start = 0
    for batch in _batches(file, rows, ignored):
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, batch.schema) as writer:
            writer.write_batch(batch)
        locators = tuple(f"{file.name}#row {start + i + 1}" for i in range(batch.num_rows))
        yield locators, sink.getvalue().to_pybytes()
        start += batch.num_rows


def _batches(file: SourceFile | Table, rows: int, ignored: tuple[str, ...]) -> Iterator[pa.RecordBatch]:
    if isinstance(file, SourceFile):
        return batches(file, rows, ignored)
    return chain.from_iterable(slices(batch, rows, ignored) for batch in hub.batches(file.data))


def _sample(file: SourceFile | Table) -> list[Record]:
    """The first rows of a file that can be read at all."""
    if isinstance(file, SourceFile) and file.kind in TEXT_READERS:
        rows = islice(TEXT_READERS[file.kind](file), SAMPLE)
        return [record for _, row in rows for record in _readable(file.kind, row)]
    first = next(_batches(file, SAMPLE, ()), None)
    rows = [] if first is None else [row_at(first, index) for index in range(first.num_rows)]
    return [record for row in rows for record in _readable(file.name, row)]


def _readable(kind: str, row: Row) -> list[Record]:
    try:
        return [record_of(kind, row)]
    except Refused:
        return []


def _content(file: SourceFile | Table) -> str:
    """Fingerprint of a file's decompressed bytes; a stream that is cut is not what its bytes alone would be."""
    if isinstance(file, Table):
        return hub.fingerprint(file.data)
    if file.kind not in TEXT_READERS:
        with opened(file) as raw:
            return stream_fingerprint(raw)
    return bytes_fingerprint(_marked(file))


def _marked(file: SourceFile) -> Iterator[bytes]:
    try:
        yield from blocks(file)
    except CutShort:
        yield b"\0cut short"


def _check_mapping(spec: SourceSpec, found: tuple[str, ...]) -> None:
    known = sorted({name for form in FORMATS.values() for name in form.known})
    if unknown := sorted(spec.mapping.keys() - known):
        raise SourceError(
            f"source {spec.name}: the mapping's {', '.join(unknown)} is no column a format wants; "
            f"wanted names are {', '.join(known)}"
        )
    if absent := sorted(set(spec.mapping.values()) - set(found)):
        raise SourceError(
            f"source {spec.name}: the mapping names column {', '.join(absent)}, but found are [{', '.join(found)}]"
        )
