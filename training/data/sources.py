"""A source: named files of preference rows, opened in sorted order, read in chunks, parsed in workers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from training.data.pair import Pair, Rejection


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceSpec:
    """Where a source's rows lie and how they are to be read."""

    name: str
    inputs: tuple[str, ...]
    """Paths, globs, folders, fsspec URLs, or `hf://NAME@REVISION`."""
    format: str = "auto"
    mapping: dict[str, str] = field(default_factory=dict[str, str])
    """Wanted column -> the column's name in the files."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """An opened source: files found and hashed, format known."""

    spec: SourceSpec
    format: str
    ignored_columns: tuple[str, ...]
    fingerprint: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RawChunk:
    """Rows as they lie in a file, with their locators; picklable. `len(chunk)` is the number of rows."""

    source: str
    locators: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.locators)


def open_source(spec: SourceSpec) -> Source:
    """Find a source's files, tell their format, hash their content.

    Raises:
        SourceError: a file is missing or unreadable, or no one format fits.
    """
    raise NotImplementedError


def chunks(source: Source, rows: int = 512) -> Iterator[RawChunk]:
    """The source's rows in order, at most `rows` at a time."""
    raise NotImplementedError


def parse(chunk: RawChunk) -> list[Pair | Rejection]:
    """Every pair and every rejection of a chunk's rows, in order."""
    raise NotImplementedError
