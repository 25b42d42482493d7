"""Canonical pairs on disk: what a source's rows became, before any tokenizer.

One Arrow file of outcomes in the order of the rows: pairs, and the rows that were not let in. Messages and tools stand
as JSON text, so that a tool's arguments come back exactly as they were written whatever the other rows hold. A
manifest, written last by rename, makes the folder visible, and `rewind` gives its rows as chunks, so that
the shards made from it have the fingerprint of those made from the source directly.
"""

from __future__ import annotations

import json
import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa

from training.data.fingerprint import file_fingerprint, fp
from training.data.manifest import MANIFEST
from training.data.pair import Message, Pair, Rejection
from training.data.sources import Source, chunks, parse
from training.data.target import locked, staged
from training.errors import DatasetError

FORMAT = 1
FILE = "pairs-00000.arrow"
AGAIN = "materialise the source's pairs again"
TEXTS = ("source", "locator", "prompt", "chosen", "rejected", "tools", "reason", "detail", "row")
SCHEMA = pa.schema([pa.field(name, pa.large_string()) for name in TEXTS])
"""A pair has prompt, chosen, rejected and tools; a row that was not let in has reason, detail and row."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredPairs:
    """A committed folder of a source's outcomes."""

    path: Path
    fingerprint: str
    """`pairs1:…` of the outcomes in order."""
    source: dict[str, Any]
    """Name, format, mapping, ignored columns, files and fingerprint of the source."""
    counts: dict[str, Any]
    """rows, pairs, quarantined, reasons."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OutcomeChunk:
    """Outcomes of some rows, as an Arrow stream; a worker turns them back into pairs and rejections."""

    content: bytes
    rows: int

    def __len__(self) -> int:
        return self.rows


def describe(source: Source) -> dict[str, Any]:
    """A source as manifests name it."""
    return {
        "name": source.spec.name,
        "format": source.format,
        "mapping": dict(source.spec.mapping),
        "ignored_columns": list(source.ignored_columns),
        "files": [file.name for file in source.files],
        "fingerprint": source.fingerprint,
    }


def store_pairs(
    source: Source, root: Path, *, progress: Callable[[int, int | None], None] | None = None
) -> StoredPairs:
    """Write a source's outcomes to `root/FINGERPRINT`, or find that they are there.

    Raises:
        SourceError: a file cannot be read.
        DatasetError: nothing can be written there.
    """
    with locked(root), staged(root, FORMAT, describe(source)) as staging:
        for path in sorted(root.glob(f"*/{MANIFEST}")):
            with suppress(DatasetError):  # a damaged folder is written anew
                found = open_pairs(path.parent)
                if found.source["fingerprint"] == source.fingerprint and found.source["name"] == source.spec.name:
                    return found
        counts = _write_pairs(source, staging / FILE, progress)
        digest = file_fingerprint(staging / FILE)
        fingerprint = fp("pairs", digest)
        manifest = {
            "format": FORMAT,
            "fingerprint": fingerprint,
            "digest": digest,
            "source": describe(source),
            "counts": counts,
        }
        (staging / MANIFEST).write_text(json.dumps(manifest, indent=2, sort_keys=True) + "\n", encoding="utf-8")
        final = root / fingerprint.replace(":", "-")
        if final.exists():  # the same outcomes of a source with other bytes, or damaged ones
            shutil.rmtree(final)
        staging.rename(final)
    return open_pairs(final)


def _write_pairs(source: Source, path: Path, progress: Callable[[int, int | None], None] | None) -> dict[str, Any]:
    rows = pairs = 0
    reasons: Counter[str] = Counter()
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, SCHEMA) as writer:
        for chunk in chunks(source):
            outcomes = parse(chunk)
            writer.write_batch(pa.RecordBatch.from_pylist([_to_row(outcome) for outcome in outcomes], schema=SCHEMA))
            rows += len(chunk)
            refused = [outcome.reason for outcome in outcomes if isinstance(outcome, Rejection)]
            pairs += len(outcomes) - len(refused)
            reasons.update(refused)
            if progress:
                progress(rows, None)
    return {"rows": rows, "pairs": pairs, "quarantined": reasons.total(), "reasons": dict(reasons)}


def open_pairs(path: Path) -> StoredPairs:
    """Open a folder that `store_pairs` wrote, and check its file.

    Raises:
        DatasetError: it is missing, altered or of another format.
    """
    try:
        manifest: Any = json.loads((path / MANIFEST).read_bytes())
        if manifest["format"] != FORMAT or file_fingerprint(path / FILE) != manifest["digest"]:
            raise DatasetError(f"{path / FILE}: is not as its manifest says; {AGAIN}")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DatasetError(f"{path}: holds no stored pairs ({error}); {AGAIN}") from None
    return StoredPairs(
        path=path, fingerprint=manifest["fingerprint"], source=manifest["source"], counts=manifest["counts"]
    )


def rewind(stored: StoredPairs) -> Iterator[OutcomeChunk]:
    """The outcomes in order, as they were chunked when they were read."""
    reader = pa.ipc.open_file(pa.memory_map(str(stored.path / FILE)))
    for number in range(reader.num_record_batches):
        batch = reader.get_batch(number)
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, SCHEMA) as writer:
            writer.write_batch(batch)
        yield OutcomeChunk(content=sink.getvalue().to_pybytes(), rows=batch.num_rows)


def restore(chunk: OutcomeChunk) -> list[Pair | Rejection]:
    """The pairs and rejections of a chunk."""
    return [_from_row(row) for row in pa.ipc.open_stream(chunk.content).read_all().to_pylist()]


def _to_row(outcome: Pair | Rejection) -> dict[str, str | None]:
    own: dict[str, str | None] = {"source": outcome.source, "locator": outcome.locator}
    if isinstance(outcome, Rejection):
        return {**own, "reason": outcome.reason, "detail": outcome.detail, "row": outcome.row}
    sides = {
        name: _text([turn.to_dict() for turn in getattr(outcome, name)]) for name in ("prompt", "chosen", "rejected")
    }
    return {**own, **sides, "tools": _text(outcome.tools)}


def _from_row(row: dict[str, Any]) -> Pair | Rejection:
    if row["reason"] is not None:
        return Rejection(**{name: row[name] for name in ("source", "locator", "reason", "detail", "row")})
    prompt, chosen, rejected = (
        tuple(Message.from_dict(turn) for turn in json.loads(row[name])) for name in ("prompt", "chosen", "rejected")
    )
    return Pair(
        prompt=prompt,
        chosen=chosen,
        rejected=rejected,
        tools=tuple(json.loads(row["tools"])),
        source=row["source"],
        locator=row["locator"],
    )


def _text(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))
