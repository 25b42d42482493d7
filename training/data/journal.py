"""The journal of a preparation: what is finished, so that a killed one goes on from there.

One line of JSON for each finished shard: the shard, where in the source the next one begins, and the counts up to
there. The chunks of a source are the same in every run, so a place is a number of chunks and a number of pairs of the
next one. Nothing of it is believed unseen: a resumed run takes the lines from the front as long as each shard, and what
was quarantined beside it, is what its line says, and drops the rest. What can be counted again from the shards is not
written down.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO

from training.data.fingerprint import bytes_fingerprint
from training.data.manifest import QUARANTINE, StoredFile
from training.errors import DatasetError

JOURNAL = "journal.jsonl"

DAMAGE = (ValueError, LookupError, TypeError, OSError, DatasetError)
"""What a line that is cut, or whose files were not written out, raises."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """How far a preparation was when it had finished a shard."""

    shard: StoredFile
    chunks: int
    """Chunks of the source of which nothing is left to do."""
    into: int
    """Pairs of the next chunk that stand in finished shards."""
    rows: int
    """Rows of those chunks; the counts below are of their rows, too."""
    reasons: Mapping[str, int]
    notes: Mapping[str, int]
    quarantine_bytes: int
    """Length of the quarantine then."""
    quarantine_digest: str
    """`file1:…` of what was added to it since the mark before."""


def append(folder: Path, mark: Mark) -> None:
    """Add a mark."""
    with (folder / JOURNAL).open("a", encoding="utf-8") as stream:
        stream.write(json.dumps(asdict(mark)) + "\n")


def recover(folder: Path) -> list[Mark]:
    """The marks whose files are as they say, from the first on, and a journal that holds these alone."""
    path = folder / JOURNAL
    lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
    marks: list[Mark] = []
    for line in lines:
        try:
            mark = _checked(json.loads(line), folder, marks[-1].quarantine_bytes if marks else 0)
        except DAMAGE:
            break
        marks.append(mark)
    path.write_bytes(b"".join(lines[: len(marks)]))
    return marks


def quarantined(folder: Path, start: int, end: int) -> str:
    """`file1:…` of a stretch of the quarantine."""
    with (folder / QUARANTINE).open("rb") as stream:
        stream.seek(start)
        return bytes_fingerprint(_blocks(stream, end - start))


def _checked(values: dict[str, Any], folder: Path, start: int) -> Mark:
    values["shard"] = StoredFile(**values["shard"])
    mark = Mark(**values)
    mark.shard.check(folder)
    found = quarantined(folder, start, mark.quarantine_bytes)
    if found != mark.quarantine_digest:
        raise DatasetError(f"{folder / QUARANTINE}: {found} where the journal says {mark.quarantine_digest}")
    return mark


def _blocks(stream: BinaryIO, size: int) -> Iterator[bytes]:
    while size > 0 and (block := stream.read(min(1 << 20, size))):
        yield block
        size -= len(block)
