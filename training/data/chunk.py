"""What a worker does: a chunk of rows as they lie in a file, to pairs and rejections.

A pure function of the chunk, so any process may run it and the outcome is the same for any number of them. A row gives
one pair or one rejection; a row that holds lists of answers gives one of either for each combination. Cost: 15 to 55
thousand pairs a CPU-second.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, cast

import pyarrow as pa

from training.data.formats import FORMATS, Record, convert, settle
from training.data.formats.messages import kind as kind_of
from training.data.pair import Pair, Refused, Rejection, make_pair
from training.data.readers import Fault, Row, decode


@dataclass(frozen=True, slots=True, kw_only=True)
class RawChunk:
    """Rows of one file as they lie in it. `len(chunk)` is their number."""

    source: str
    format: str
    mapping: Mapping[str, str]
    kind: str
    """The kind of file: how the rows are decoded."""
    locators: tuple[str, ...]
    rows: tuple[Row, ...] | bytes
    """Text rows, or record batches as an Arrow stream."""

    def __len__(self) -> int:
        return len(self.locators)


def parse(chunk: RawChunk) -> list[Pair | Rejection]:
    """Every pair and every rejection of a chunk's rows, in order: at least one of them for each row."""
    return [outcome for where, row in _rows(chunk) for outcome in _judge(chunk, where, row)]


def rename(record: Record, mapping: Mapping[str, str]) -> Record:
    """The row under the wanted names: a mapped column leaves its own name and replaces a column of the wanted one."""
    if not mapping:
        return record
    taken = set(mapping.values())
    kept = {name: value for name, value in record.items() if name not in taken and name not in mapping}
    return {**{wanted: record[name] for wanted, name in mapping.items() if name in record}, **kept}


def _judge(chunk: RawChunk, where: str, row: Row) -> Iterator[Pair | Rejection]:
    try:
        record = rename(record_of(chunk.kind, row), chunk.mapping)
        drafts = list(convert(FORMATS[chunk.format], record))
    except Refused as refusal:
        yield _reject(chunk, where, refusal, row)
        return
    for draft in drafts:
        try:
            chosen, rejected, tools = settle(draft, record)
        except Refused as refusal:
            yield _reject(chunk, where + draft.part, refusal, row)
            continue
        made = make_pair((), chosen, rejected, tools=tools, source=chunk.source, locator=where + draft.part)
        yield replace(made, row=_text(row)) if isinstance(made, Rejection) else made


def _reject(chunk: RawChunk, locator: str, refusal: Refused, row: Row) -> Rejection:
    return Rejection(source=chunk.source, locator=locator, reason=refusal.reason, detail=refusal.detail, row=_text(row))


def _text(row: Row) -> str:
    """The row as quarantine keeps it."""
    if isinstance(row, bytes):
        return row.decode("utf-8", "replace")
    return row.text if isinstance(row, Fault) else json.dumps(row, ensure_ascii=False, default=repr)


def record_of(kind: str, row: Row) -> Record:
    """The columns of a row as it lies in a file of a kind.

    Raises:
        Refused: it cannot be told from the file, is not UTF-8, not JSON, or no object.
    """
    if isinstance(row, Fault):
        raise Refused(row.reason, row.detail)
    if isinstance(row, dict):
        return {name: _cell(value) for name, value in row.items()} if kind == "csv" else _without_padding(row)
    try:
        value = decode(row)
    except UnicodeDecodeError as error:
        raise Refused("not_utf8", f"not UTF-8: {error.reason} at byte {error.start + 1}") from None
    except (ValueError, RecursionError) as error:
        raise Refused("broken_json", f"not JSON: {error}") from None
    if not isinstance(value, dict):
        raise Refused("not_an_object", f"{kind_of(value)}, not an object with columns")
    return cast("Record", value)


def _cell(value: str) -> Any:
    """A CSV cell: text, but a JSON list of messages is what a list of messages can only look like there."""
    if not value.startswith('[{"'):
        return value
    try:
        items = json.loads(value)
    except (ValueError, RecursionError):
        return value
    return items if all(isinstance(item, dict) and ("role" in item or "from" in item) for item in items) else value


def _rows(chunk: RawChunk) -> Iterator[tuple[str, Row]]:
    if isinstance(chunk.rows, bytes):
        table = pa.ipc.open_stream(chunk.rows).read_all()
        try:
            records: list[Row] = table.to_pylist()
        except UnicodeDecodeError:
            records = [row_at(table, index) for index in range(table.num_rows)]
        return zip(chunk.locators, records, strict=True)
    return zip(chunk.locators, chunk.rows, strict=True)


def row_at(table: pa.Table | pa.RecordBatch, index: int) -> Row:
    """One row of a table; a fault where one of its texts is not UTF-8, which a table does not check."""
    try:
        return table.slice(index, 1).to_pylist()[0]
    except UnicodeDecodeError as error:
        return Fault(reason="not_utf8", detail=f"a text is not UTF-8: {error.reason}", text="")


def _without_padding(record: Record) -> Record:
    """A row of a columnar file without the nulls inside its structs.

    A struct column has every key of every row, null where a row has none; a null there cannot be told from an absent
    key, and only the latter is common. A column's own null stays.
    """
    return {name: _absent(value) if isinstance(value, list | dict) else value for name, value in record.items()}


def _absent(value: Any) -> Any:
    if isinstance(value, dict):
        given = cast("dict[str, Any]", value)
        return {key: _absent(inner) for key, inner in given.items() if inner is not None}
    if isinstance(value, list):
        return [_absent(inner) for inner in cast("list[Any]", value)]
    return value
