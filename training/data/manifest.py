"""The manifest of a dataset: what it holds, what it was made from, and the commit that makes it visible.

`manifest.json` is written last, by rename; a folder without it does not exist to readers. It carries the size and
digest of every other file of the folder and its own digest, so that a flipped byte anywhere is refused or changes
nothing.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from training.data.fingerprint import canonical_json, file_fingerprint, fp
from training.errors import DatasetError

MANIFEST = "manifest.json"
QUARANTINE = "quarantine.jsonl"
FORMAT = 1
AGAIN = "prepare the dataset again"


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredFile:
    """A file of the dataset, as it was when it was committed."""

    file: str
    rows: int
    tokens: int
    """Tokens as laid out with a shared prompt: prompt + chosen + rejected; 0 in the quarantine."""
    bytes: int
    digest: str

    def check(self, folder: Path) -> None:
        """Compare the file with what it was.

        Raises:
            DatasetError: it is missing, cut or altered.
        """
        path = folder / self.file
        try:
            size = path.stat().st_size
            if size != self.bytes:
                raise DatasetError(f"{path}: has {size} bytes, but the manifest says {self.bytes}; {AGAIN}")
            digest = file_fingerprint(path)
        except OSError as error:
            raise DatasetError(f"{path}: cannot be read ({error.strerror}); {AGAIN}") from None
        if digest != self.digest:
            raise DatasetError(f"{path}: its digest is {digest}, but the manifest says {self.digest}; {AGAIN}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """A dataset's account of itself; counts and tokens are exact integers."""

    fingerprint: str
    """`ds1:…` of the ordered rows."""
    inputs: Mapping[str, str]
    """Fingerprints of source, tokenizer, template and recipe."""
    rendering: str
    max_tokens: int | None
    overflow: str
    date: str | None
    """Day that the template was given."""
    tokenizer_path: str
    """Where the tokenizer lay: provenance, never identity."""
    switched_off: tuple[str, ...]
    """What the tokenizer's file carried over and was not applied."""
    vocab_size: int
    pad_id: int
    source: Mapping[str, Any]
    """The source's name, format, mapping, ignored columns and files."""
    counts: Mapping[str, Any]
    """rows, pairs, quarantined, reasons, notes, cut, duplicates."""
    tokens: Mapping[str, int]
    """prompt, chosen, rejected; source (a shared prompt once), logical (twice), loss (supervised)."""
    shards: tuple[StoredFile, ...]
    quarantine: StoredFile

    def to_json(self) -> dict[str, Any]:
        """The manifest as it lies in its file."""
        values: dict[str, Any] = {"format": FORMAT, **asdict(self)}
        return {**values, "digest": _digest(values)}


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Commit a folder whose other files are in place."""
    staging = folder / f".{MANIFEST}"
    text = json.dumps(manifest.to_json(), indent=2, sort_keys=True, ensure_ascii=False, allow_nan=False)
    staging.write_text(text + "\n", encoding="utf-8")
    staging.replace(folder / MANIFEST)


def read_manifest(folder: Path) -> Manifest:
    """Read a dataset's manifest.

    Raises:
        DatasetError: there is none, it was altered, or it is of another format.
    """
    path = folder / MANIFEST
    try:
        values: Any = json.loads(path.read_bytes())
    except FileNotFoundError:
        there = "does not hold a finished dataset (no manifest.json)" if folder.is_dir() else "is not there"
        raise DatasetError(f"{folder}: {there}; name a folder that `pairledger prepare` wrote") from None
    except (OSError, ValueError) as error:
        raise DatasetError(f"{path}: cannot be read: {error}; {AGAIN}") from None
    if not isinstance(values, dict) or "format" not in values:
        raise DatasetError(f"{path}: is not a dataset's manifest; {AGAIN}")
    if values.pop("format") != FORMAT:
        raise DatasetError(f"{path}: is of another format than {FORMAT}, which this version reads; {AGAIN}")
    digest = values.pop("digest", None)
    if digest != _digest({"format": FORMAT, **values}) or values.keys() != {field.name for field in fields(Manifest)}:
        raise DatasetError(f"{path}: was altered after it was written; {AGAIN}")
    values["shards"] = tuple(StoredFile(**shard) for shard in values["shards"])
    values["quarantine"] = StoredFile(**values["quarantine"])
    values["switched_off"] = tuple(values["switched_off"])
    return Manifest(**values)


def _digest(values: Mapping[str, Any]) -> str:
    return fp("manifest", json.loads(canonical_json(values)))
