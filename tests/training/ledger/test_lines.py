"""Two readers of a ledger's lines: the fast one takes nothing that the strict one refuses, and reads the same."""

from __future__ import annotations

import io
import random
import re
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pytest

from tests.training.ledger import shop
from training.errors import LedgerError
from training.ledger import lines
from training.ledger.lines import LINES, line_blocks, read_lines
from training.ledger.record import parse_line

PATH = Path("steps.jsonl")
UNKNOWN = replace(shop.step(2, counters=None, unknown_reason='said ":" and \\": so', loss=float("nan")), sources=())
STEPS = [replace(shop.step(1), wins=None, flops=1e22), UNKNOWN, replace(shop.step(3), pairs=()), shop.step(4)]
WRITTEN = [step.to_line().encode() for step in STEPS]


def block(*written: bytes) -> bytes:
    return b"".join(line + b"\n" for line in written)


def fast(data: bytes) -> pa.Table | None:
    return lines._fast(data, data[:-1].split(b"\n"))  # pyright: ignore[reportPrivateUsage]


def strict(data: bytes) -> pa.Table:
    return lines._strict(data[:-1].split(b"\n"), PATH, 1)  # pyright: ignore[reportPrivateUsage]


def test_what_a_run_writes_is_read_fast_and_as_it_was_written() -> None:
    found = fast(block(*WRITTEN))
    assert found is not None and found.schema == LINES
    assert found.equals(strict(block(*WRITTEN)))
    assert found["step"].to_pylist() == [1, 2, 3, 4]
    assert found["counters"][0].as_py()["sum_document_tokens_squared"] == 126
    assert found["counters"][1].as_py() is None
    assert found["pairs"][3].as_py()["loss"] == [0.4, 0.2]
    assert found["wins"].to_pylist() == [None, 1, 2, 2]


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (b'"step":4', b'"step": 4'),
        (b'"step":4', b'"step" :4'),
        (b'{"format"', b' {"format"'),
        (b'"wins":2', b'"w\\u0069ns":2'),
        (b'"loss":0.30000000000000004', b'"loss":3'),
        (b'"loss":0.30000000000000004', b'"loss":9007199254740993'),
    ],
)
def test_what_is_only_written_in_another_way_is_taken(old: bytes, new: bytes) -> None:
    assert old in WRITTEN[3]
    table = read_lines(block(*WRITTEN[:3], WRITTEN[3].replace(old, new, 1)), PATH, 1)
    assert table.drop_columns("loss").equals(strict(block(*WRITTEN)).drop_columns("loss"))


ANY = [b"1.5", b"true", b"null", b'"x"', b"[]", b"{}", b"-0", b"1e999", b"NaN", b"-Infinity", b"3", b"9" * 19, b"1e3"]
ANY += [
    b'"\xff"',
    b'"\\ud800"',
    b'"a\\u0000b"',
    b'"\\":"',
    b"0.1",
    b"[1,null]",
    b"[0.5]",
    b'["a"]',
    b"",
    b"01",
    b"9" * 400,
]
TOKEN = re.compile(rb'(?<=[:\[,])(-?\d[\d.e+-]*|"(?:[^"\\]|\\.)*"(?!:)|null|\[[^\[\]{}]*\])')
FIELD = re.compile(rb'"\w+":(?:-?\d[\d.e+-]*|"(?:[^"\\]|\\.)*"|null|\[[^\[\]{}]*\]),')


def damaged(line: bytes, rng: random.Random) -> bytes:
    """A line with one thing changed: a value, a field that is missing or twice, a byte, its end, its neighbour."""
    way = rng.randrange(6)
    if way == 0:
        found = rng.choice(list(TOKEN.finditer(line)))
        return line[: found.start()] + rng.choice(ANY) + line[found.end() :]
    if way in (1, 2):
        found = rng.choice(list(FIELD.finditer(line)))
        return line[: found.start()] + found[0] * (way - 1) * 2 + line[found.end() :]
    place = rng.randrange(len(line))
    if way == 3:
        return line[:place] + rng.choice([b" ", b"\t", b"{", b'"', b"\\", b",", b"\xef\xbb\xbf", b"\0"]) + line[place:]
    if way == 4:
        return line[:place] + bytes([rng.randrange(11, 256)]) + line[place + 1 :]
    return rng.choice([line[:place], line + line, line + b" " + line, b"", b"\xef\xbb\xbf" + line, line + b"\r"])


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_damaged_lines_are_taken_by_both_readers_alike(seed: int) -> None:
    rng, taken, refused = random.Random(seed), 0, 0
    for _ in range(700):
        written = list(WRITTEN)
        place = rng.randrange(len(written))
        written[place] = damaged(written[place], rng)
        data = block(*written)
        try:
            wanted = strict(data)
        except LedgerError as error:
            refused += 1
            assert str(error).startswith(f"steps.jsonl:{place + 1}: ")
            assert fast(data) is None, (place, written[place])
            continue
        found = fast(data)
        taken += found is not None
        assert found is None or found.equals(wanted), (place, written[place])
    assert refused > 200 and taken > 30  # neither is an empty promise


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        (b'"loss":0.30000000000000004', b'"loss":1e999', "field loss: inf cannot be kept as a number of 64 bits"),
        (b'"wins":2', b'"wins":2,"wins":1', "not strict JSON: field wins stands twice"),
        (b'"source":["a"', b'"source":["\\ud800"', r"field sources.source: '\ud800' cannot be kept as UTF-8"),
        (b'"source":["a"', b'"source":["\xff"', "not strict JSON: 'utf-8' codec can't decode byte 0xff"),
    ],
)
def test_what_no_column_can_hold_is_refused_by_name(old: bytes, new: bytes, said: str) -> None:
    assert old in WRITTEN[3]
    bad = WRITTEN[3].replace(old, new, 1)
    with pytest.raises(LedgerError) as refused:
        read_lines(block(WRITTEN[0], bad), PATH, 7)
    assert str(refused.value).startswith(f"steps.jsonl:8: {said}")
    with pytest.raises(LedgerError):
        parse_line(bad)


@pytest.mark.parametrize("size", [1, 7, 50, 10_000])
def test_blocks_are_whole_lines_whatever_their_size_and_the_cut_line_comes_last(size: int) -> None:
    data = b"one\n\ntwo\r\nthree"
    found = list(line_blocks(io.BytesIO(data), size))
    assert b"".join(found) == data
    assert found[-1] == b"three" and all(one.endswith(b"\n") for one in found[:-1])
    assert list(line_blocks(io.BytesIO(b""), size)) == []
