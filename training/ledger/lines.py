"""Many lines of a ledger as one Arrow table, a row a line: read fast where all is well, strictly where it is not.

What a line may be is what `record.parse_line` takes, at about 80,000 pairs a CPU second. Arrow's JSON reader is several
times as fast and nearly as strict: it refuses foreign fields, fields that stand twice and every value of another type
than the declared one. What it lets pass is looked for here: NaN and infinity, text that is not UTF-8, null where a
value must stand, columns of unequal lengths, and fields that are missing, which it reads as null. These are found by
counting keys: none is foreign and none stands twice, so a line with as many keys as are declared has them all. Lines in
which anything is found go to the strict reader, which names it, or takes what is only written in another way.
"""

from __future__ import annotations

import io
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import chain
from operator import ne
from pathlib import Path
from types import NoneType
from typing import Any, BinaryIO

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.json as pj

from training.errors import LedgerError
from training.ledger.record import COUNTERS, FORMAT, PAIR, SOURCE, STEP, Column, instant, parse_line

MOMENT = pa.timestamp("us")
TYPES = {int: pa.int64(), float: pa.float64(), str: pa.string()}
NESTED = {"sources": SOURCE, "pairs": PAIR}
BLOCK = 1 << 24
"""Bytes of a ledger that become rows at once."""
NAMED = 5
"""Lines of a block that a refusal names."""


def _declared(columns: Mapping[str, Column]) -> list[tuple[str, pa.DataType]]:
    return [(name, TYPES[column.kind]) for name, column in columns.items()]


LINE = pa.schema(
    [
        ("format", pa.int64()),
        *_declared(STEP),
        ("counters", pa.struct(_declared(COUNTERS))),
        *((name, pa.struct([(n, pa.list_(t)) for n, t in _declared(columns)])) for name, columns in NESTED.items()),
    ]
)
"""A line as Arrow reads it; `ended_at` is text."""
LINES = LINE.set(LINE.get_field_index("ended_at"), pa.field("ended_at", MOMENT))
"""Read lines; `ended_at` is UTC, without a zone."""
KEYS = len(LINE) + len(SOURCE) + len(PAIR)
"""Keys of a line whose counters are null."""


def line_blocks(file: BinaryIO, size: int = BLOCK) -> Iterator[bytes]:
    """A ledger from where the file stands, in blocks of whole lines; one without a newline at its end is a cut line."""
    parts: list[bytes] = []
    while piece := file.read(size):
        end = piece.rfind(b"\n") + 1
        if end:
            yield b"".join([*parts, piece[:end]])
            parts.clear()
        parts.append(piece[end:])
    if rest := b"".join(parts):
        yield rest


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Block:
    """Some lines of a ledger as they lie in the file, and what they hold; None for a cut last line."""

    first: int
    """Number of its first line, from 1."""
    data: bytes
    lines: pa.Table | None


def read_blocks(file: BinaryIO, path: Path, first: int = 1) -> Iterator[Block]:
    """Read a ledger from where the file stands, which is its line `first`; one block is read ahead of its use.

    Raises:
        LedgerError: as `read_lines`.
    """

    def read(data: bytes, first: int) -> Block:
        whole = data.endswith(b"\n")
        return Block(first=first, data=data, lines=read_lines(data, path, first) if whole else None)

    with ThreadPoolExecutor(1, thread_name_prefix="read") as reader:
        ahead: Future[Block] | None = None
        for data in line_blocks(file):
            coming, ahead = ahead, reader.submit(read, data, first)
            first += data.count(b"\n")
            if coming:
                yield coming.result()
        if ahead:
            yield ahead.result()


def read_lines(block: bytes, path: Path, first: int) -> pa.Table:
    """The lines of a block as a table of schema `LINES`; they are lines `first` and on (from 1) of the file.

    Raises:
        LedgerError: a line is not a step; names file, line and field.
    """
    lines = block[:-1].split(b"\n")
    found = _fast(block, lines)
    return _strict(lines, path, first) if found is None else found


def _strict(lines: Sequence[bytes], path: Path, first: int) -> pa.Table:
    rows: list[dict[str, Any]] = []
    faults: list[str] = []
    for number, line in enumerate(lines, first):
        try:
            values = parse_line(line)
        except LedgerError as error:
            faults.append(f"{path}:{number}: {error}")
        else:
            rows.append({**values, "format": FORMAT, "ended_at": utc(values["ended_at"])})
    if faults:
        raise LedgerError("; ".join(faults[:NAMED]) + (f"; and {len(faults) - NAMED} more" if faults[NAMED:] else ""))
    return pa.Table.from_pylist(rows, LINES)


def _fast(block: bytes, lines: Sequence[bytes]) -> pa.Table | None:
    """The table, or None where the strict reader is needed."""
    try:
        table = pj.read_json(
            io.BytesIO(block),
            read_options=pj.ReadOptions(block_size=max(len(block) // 4, *map(len, lines)) + 1),
            parse_options=pj.ParseOptions(explicit_schema=LINE, unexpected_field_behavior="error"),
        ).combine_chunks()
        if not _whole(table, lines):
            return None
        moments = pa.array([utc(instant(text)) for text in table["ended_at"].to_pylist()], MOMENT)
    except (pa.ArrowInvalid, UnicodeDecodeError, LedgerError):
        return None
    return table.set_column(table.schema.get_field_index("ended_at"), "ended_at", moments)


def _whole(table: pa.Table, lines: Sequence[bytes]) -> bool:
    """Whether these lines are ones that the strict reader takes, as it reads them."""
    known = table["counters"].is_valid().to_pylist()
    if len(known) != len(lines) or table["format"].unique().to_pylist() != [FORMAT]:
        return False
    wanted = (KEYS + counted * len(COUNTERS) for counted in known)
    if any(map(ne, map(_keys, lines), wanted)) or not all(line.startswith(b"{") for line in lines):
        return False
    scalars = ((table[name].combine_chunks(), column, 0) for name, column in STEP.items())
    counters = zip(_fields(table, "counters"), COUNTERS.values(), (known.count(False) for _ in COUNTERS), strict=True)
    if not all(map(_fits, *zip(*chain(scalars, counters), strict=True))):
        return False
    for name, columns in NESTED.items():
        lists = _fields(table, name)
        lengths = [pc.call_function("list_value_length", [one]) for one in lists]
        if any(one.null_count for one in lists) or not all(map(lengths[0].equals, lengths)):
            return False
        if not all(map(_fits, (one.flatten() for one in lists), columns.values(), (0 for _ in lists))):
            return False
    return True


def _keys(line: bytes) -> int:
    """Keys of an object without spaces before its colons; more where an escaped quote before a colon stands in text."""
    return line.count(b'":') - (line.count(b'\\":') if b"\\" in line else 0)


def _fits(values: pa.Array, column: Column, nulls: int) -> bool:
    """Whether values are finite, UTF-8, and null in no other places than those declared and `nulls` unknown ones."""
    if NoneType not in column.accepted and values.null_count != nulls:
        return False
    if column.kind is str:
        values.validate(full=True)
    return column.kind is not float or pc.call_function("is_finite", [values]).false_count == 0


def _fields(table: pa.Table, name: str) -> list[pa.Array]:
    return table[name].combine_chunks().flatten()


def line_numbers(steps: Iterable[int]) -> dict[int, list[int]]:
    """Where each step stands, as places from 0 in the order given."""
    places: dict[int, list[int]] = {}
    for place, step in enumerate(steps):
        places.setdefault(step, []).append(place)
    return places


def utc(moment: datetime) -> datetime:
    """A moment as the database keeps it: UTC, without a zone."""
    return moment.astimezone(UTC).replace(tzinfo=None)
