"""Rows as they lie in a file, each with its locator, without looking into them.

A text file gives its records as bytes, a columnar one its batches, so that the costly part, decoding, is left to the
workers. JSON lines are split on the line feed alone: U+2028, U+0085 and a carriage return may stand inside a text.
A file that ends inside a record gives a `Fault` for it, not a partial row and not an error. Memory: one record (lines,
CSV), one array element (JSON), about eight megabytes of rows (Parquet, Arrow).
"""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, BinaryIO, cast

import pyarrow as pa
import pyarrow.parquet as pq

from training.data.files import CutShort, SourceFile, blocks, lines, opened
from training.data.json_array import Broken, EndsInside, elements
from training.errors import SourceError

BATCH_BYTES = 8 << 20
"""Rows of a columnar file are taken in batches of about this many bytes."""

CELL_LIMIT = 1 << 28
"""Longest CSV cell; a quote that is never closed ends here instead of filling the memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """A row that could not be told from the rest of the file."""

    reason: str
    detail: str
    text: str


Row = bytes | dict[str, Any] | Fault
"""JSON text, a CSV row by column, or a fault."""


def json_lines(file: SourceFile) -> Iterator[tuple[str, Row]]:
    """(locator `name:line`, JSON text) of each line that is not blank.

    Raises:
        SourceError: the file cannot be read.
    """
    count, line = 0, b""
    try:
        for after in lines(file):  # a line is given when the next is there, so that the last one is known
            if line.strip():
                yield f"{file.name}:{count}", line
            count, line = count + 1, after
    except CutShort as cut:
        if line.strip():
            yield f"{file.name}:{count}", line
        yield f"{file.name}:{count + 1}", _cut_stream(cut)
        return
    if line.strip():
        yield f"{file.name}:{count}", _unterminated(line)


def json_file(file: SourceFile) -> Iterator[tuple[str, Row]]:
    """(locator, JSON text) of a `.json` file: an array's elements (`name#element`), or lines where it is no array.

    Raises:
        SourceError: the file cannot be read, or is broken at a place from which the rest cannot be found.
    """
    try:
        head = next((block.lstrip(b"\xef\xbb\xbf \t\r\n") for block in blocks(file)), b"")
    except CutShort:
        head = b""
    return _array(file) if head.startswith(b"[") else _objects(file)


def csv_rows(file: SourceFile) -> Iterator[tuple[str, Row]]:
    """(locator `name:line`, cells by the header's names) of each row; `line` is where the row begins.

    Raises:
        SourceError: the file cannot be read, or its header names a column twice.
    """
    csv.field_size_limit(CELL_LIMIT)
    reader = csv.reader((line.decode("utf-8", "surrogateescape") + "\n" for line in lines(file)), strict=True)
    header: list[str] | None = None
    while True:
        where = f"{file.name}:{reader.line_num + 1}"
        try:
            cells = next(reader)
        except StopIteration:
            return
        except CutShort as cut:
            yield where, _cut_stream(cut)
            return
        except csv.Error as error:
            ends = "unexpected end of data" in str(error)
            yield where, Fault(reason="truncated" if ends else "broken_csv", detail=str(error), text="")
            continue
        if not cells:
            continue
        if header is None:
            header = _header(file, cells)
            continue
        yield where, _cells(header, cells)


def batches(file: SourceFile, rows: int, ignored: tuple[str, ...]) -> Iterator[pa.RecordBatch]:
    """Record batches of a Parquet or Arrow file, at most `rows` rows and about `BATCH_BYTES` each.

    Args:
        file: The file.
        rows: Largest number of rows in a batch.
        ignored: Columns to leave unread.

    Raises:
        SourceError: the file cannot be read.
    """
    with opened(file) as raw:
        if file.kind == "parquet":
            yield from _parquet(pq.ParquetFile(raw), rows, ignored)
        else:
            yield from _arrow(raw, rows, ignored)


def decode(text: bytes) -> Any:
    """The value of a JSON text in UTF-8.

    Raises:
        UnicodeDecodeError: it is not UTF-8.
        ValueError, RecursionError: it is not JSON.
    """
    return json.loads(text.decode("utf-8"))


def _unterminated(line: bytes) -> Row:
    """The last line of a file that does not end in a line feed: a row if it is whole, else the file was cut in it."""
    try:
        decode(line)
    except (ValueError, RecursionError) as error:
        text = line.decode("utf-8", "replace")
        return Fault(reason="truncated", detail=f"truncated: the file ends inside a record: {error}", text=text)
    return line


def _cut_stream(cut: CutShort) -> Fault:
    text = cast("bytes", cut.args[0]).decode("utf-8", "replace") if cut.args else ""
    detail = "truncated: the compressed stream ends before its end marker; what followed is lost"
    return Fault(reason="truncated", detail=detail, text=text)


def _objects(file: SourceFile) -> Iterator[tuple[str, Row]]:
    for index, (where, row) in enumerate(json_lines(file)):
        if index == 0 and isinstance(row, bytes):
            try:
                decode(row)
            except (ValueError, RecursionError) as error:
                raise SourceError(
                    f"{where}: neither a JSON array of rows nor one JSON object a line: {error}; "
                    "write the rows as an array, or one a line as .jsonl"
                ) from None
        yield where, row


def _array(file: SourceFile) -> Iterator[tuple[str, Row]]:
    number, cut = 0, False

    def until_cut() -> Iterator[bytes]:
        nonlocal cut
        try:
            yield from blocks(file)
        except CutShort:
            cut = True

    try:
        for number, text in enumerate(elements(until_cut()), start=1):
            yield f"{file.name}#{number}", text
        if cut:
            yield f"{file.name}#{number + 1}", _cut_stream(CutShort())
    except EndsInside as end:
        where = f"{file.name}#{end.number}"
        detail = "truncated: the file ends inside the array; elements after the last whole one are lost"
        yield where, Fault(reason="truncated", detail=detail, text=end.rest)
    except Broken as broken:
        where = f"{file.name}#{broken.number}"
        raise SourceError(f"{where}: broken JSON: {broken.why}; the elements after it cannot be found") from None


def _header(file: SourceFile, cells: list[str]) -> list[str]:
    twice = sorted({name for name in cells if cells.count(name) > 1})
    if twice:
        raise SourceError(f"{file.name}:1: the header names {', '.join(twice)} more than once; rename one of them")
    return cells


def _cells(header: list[str], cells: list[str]) -> Row:
    text = ",".join(cells)
    if not text.isascii() and any("\udc80" <= char <= "\udcff" for char in text):
        return Fault(reason="not_utf8", detail="a cell is not UTF-8", text=text.encode(errors="replace").decode())
    if len(cells) != len(header):
        detail = f"{len(cells)} cells where the header has {len(header)}"
        return Fault(reason="broken_csv", detail=detail, text=text)
    return dict(zip(header, cells, strict=True))


def _parquet(file: pq.ParquetFile, rows: int, ignored: tuple[str, ...]) -> Iterator[pa.RecordBatch]:
    names = [name for name in file.schema_arrow.names if name not in ignored]
    for group in range(file.num_row_groups):
        meta = file.metadata.row_group(group)
        size = _batch_rows(rows, meta.total_byte_size, meta.num_rows)
        yield from file.iter_batches(batch_size=size, row_groups=[group], columns=names)


def _arrow(raw: BinaryIO, rows: int, ignored: tuple[str, ...]) -> Iterator[pa.RecordBatch]:
    magic = raw.read(6)
    raw.seek(0)
    if magic == b"ARROW1":
        reader = pa.ipc.open_file(raw)
        found: Iterator[pa.RecordBatch] = (reader.get_batch(i) for i in range(reader.num_record_batches))
    else:
        found = iter(pa.ipc.open_stream(raw))
    for batch in found:
        yield from slices(batch, rows, ignored)


def slices(batch: pa.RecordBatch, rows: int, ignored: tuple[str, ...]) -> Iterator[pa.RecordBatch]:
    """A batch in pieces of at most `rows` rows and about `BATCH_BYTES`, without the columns `ignored`."""
    batch = batch.select([name for name in batch.schema.names if name not in ignored])
    size = _batch_rows(rows, batch.nbytes, batch.num_rows)
    for start in range(0, batch.num_rows, size):
        yield batch.slice(start, size)


def _batch_rows(rows: int, size: int, count: int) -> int:
    return max(1, min(rows, BATCH_BYTES * count // max(size, 1)))
