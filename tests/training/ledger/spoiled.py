"""Ways to spoil the ledger of the store that fits on a page, and what is then said of it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

Lines = list[bytes]


def _swapped(line: bytes) -> bytes:
    step = json.loads(line)
    step["sources"]["source"].reverse()
    return json.dumps(step).encode()


STEPS = Path("runs/r/attempts/0001/steps.jsonl")
SPOILED: dict[str, tuple[Callable[[Lines], Lines], str]] = {
    "corrupted": (
        lambda lines: [lines[0], lines[1].replace(b'"loss":', b'"loss";', 1), *lines[2:]],
        f"line can be read: {STEPS}:2: a step expected, not strict JSON",
    ),
    "one digit": (
        lambda lines: [*lines[:2], lines[2].replace(b'"source_tokens":15', b'"source_tokens":16', 1), lines[3]],
        "plan = ledger: step 3, source_tokens: 15 expected, 16 found",
    ),
    "dropped": (
        lambda lines: [lines[0], *lines[2:]],
        "plan = ledger: step 2, pairs: 2 expected, missing found",
    ),
    "doubled": (
        lambda lines: [*lines[:2], lines[1], *lines[2:]],
        f"step once an attempt: step 2, {STEPS}: 1 line expected, 2 lines found",
    ),
    "two sources swapped": (
        lambda lines: [lines[0], _swapped(lines[1]), *lines[2:]],
        "source = lengths of its pairs in the shards: step 2, a logical_tokens: 8 expected, 10 found",
    ),
}
"""What becomes of the lines, and the difference that has to be named."""


def spoil(store: Path, way: str) -> str:
    """Spoil the ledger of run `r`; gives what has to be said."""
    change, said = SPOILED[way]
    *lines, end = (store / STEPS).read_bytes().split(b"\n")
    assert end == b"" and len(lines) == 4
    (store / STEPS).write_bytes(b"".join(line + b"\n" for line in change(lines)))
    return said
