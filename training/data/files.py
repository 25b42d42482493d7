"""The files of a source: found, sorted by name, opened as a stream of their decompressed bytes.

Inputs are paths, globs, folders and any fsspec URL. A file is known by its name below its input's root, never by where
the root lies, and files are taken in the order of those names, so a source reads the same on every machine. Whether a
file is compressed is told by its first bytes. Everything here streams: memory does not grow with a file.
"""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any, BinaryIO, cast

import fsspec
import pyarrow as pa
from fsspec.core import url_to_fs

from training.errors import SourceError

KINDS = {
    ".jsonl": "lines",
    ".ndjson": "lines",
    ".json": "json",
    ".csv": "csv",
    ".parquet": "parquet",
    ".arrow": "arrow",
    ".feather": "arrow",
    ".ipc": "arrow",
}
"""File name suffix to the reader that takes it."""

PACKED = {".gz": "gzip", ".gzip": "gzip", ".zst": "zstd", ".zstd": "zstd"}
MAGIC = {b"\x1f\x8b": "gzip", b"\x28\xb5\x2f\xfd": "zstd"}

NOT_DATA = frozenset(("dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json"))
"""JSON files that `datasets` writes beside the rows; passed over in a folder."""

BLOCK = 1 << 20


class CutShort(Exception):
    """A compressed stream ends before its end marker; never leaves this package."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceFile:
    """A file of a source."""

    name: str
    """Path below the root of the input it was found by; a single file's base name."""
    kind: str
    """A value of `KINDS`, or `hub`."""
    path: str
    """Where `fs` finds it."""
    fs: fsspec.AbstractFileSystem
    root: str
    """Last part of the input's root: tells apart two inputs that hold files of one name."""


def find(source: str, inputs: Sequence[str]) -> tuple[SourceFile, ...]:
    """All files of the inputs, sorted by name; a file found twice is taken once.

    Raises:
        SourceError: an input finds nothing, a file's kind is unknown, or two files have one name.
    """
    found = {(str(file.fs.protocol), file.path): file for given in inputs for file in _find(source, given)}
    files = list(found.values())
    names = [file.name for file in files]
    files = [_below_root(file) if names.count(file.name) > 1 else file for file in files]
    files.sort(key=lambda file: file.name)
    for left, right in zip(files, files[1:], strict=False):
        if left.name == right.name:
            raise SourceError(
                f"source {source}: {left.path} and {right.path} are both called {left.name}, so a row's locator would "
                "not tell them apart; give the folder above them as one input"
            )
    return tuple(files)


@contextmanager
def opened(file: SourceFile) -> Generator[BinaryIO, None, None]:
    """The file's bytes as they lie, seekable.

    Raises:
        SourceError: it cannot be opened or read.
    """
    try:
        with file.fs.open(file.path, "rb") as stream:
            yield cast("BinaryIO", stream)
    except (OSError, zlib.error, pa.ArrowException) as error:
        raise SourceError(f"{file.name}: cannot be read: {_reason(error)} ({file.path})") from None


def blocks(file: SourceFile) -> Iterator[bytes]:
    """The file's decompressed bytes, about a megabyte at a time.

    Raises:
        CutShort: the compressed stream ends early; every byte that could be had was given before.
        SourceError: the file cannot be opened or read.
    """
    with opened(file) as raw:
        head = raw.read(4)
        raw.seek(0)
        packing = next((packing for magic, packing in MAGIC.items() if head.startswith(magic)), None)
        named = PACKED.get(PurePosixPath(file.name).suffix.lower())
        if named and not packing:
            raise SourceError(f"{file.name}: is named {named}, but its first bytes {head!r} are not; it may be damaged")
        stream = _decompressed(raw, packing)
        while True:
            try:
                block = stream.read1(BLOCK) if packing == "gzip" else stream.read(BLOCK)
            except EOFError:
                raise CutShort from None
            except OSError as error:
                if packing == "zstd" and "Truncated" in str(error):
                    raise CutShort from None
                raise
            if not block:
                return
            yield block


def lines(file: SourceFile) -> Iterator[bytes]:
    r"""The file's lines, split at `\n` and nowhere else; the last one is empty if the file ends in `\n`.

    A byte order mark at the start is left out.

    Raises:
        CutShort: the compressed stream ends early; its argument is the part of a line that was left.
        SourceError: the file cannot be opened or read.
    """
    pending: list[bytes] = []
    first = True
    try:
        for block in blocks(file):
            if first:
                block, first = block.removeprefix(b"\xef\xbb\xbf"), False
            head, *rest = block.split(b"\n")
            pending.append(head)
            if rest:
                yield b"".join(pending)
                yield from rest[:-1]
                pending = [rest[-1]]
    except CutShort:
        raise CutShort(b"".join(pending)) from None
    yield b"".join(pending)


def _find(source: str, given: str) -> Iterator[SourceFile]:
    try:
        fs, path = cast("tuple[fsspec.AbstractFileSystem, str]", url_to_fs(given))
        if fs.isfile(path):
            root, paths = path.rpartition("/")[0], [path]
        elif any(mark in path for mark in "*?["):
            root = path[: min(path.index(mark) for mark in "*?[" if mark in path)].rpartition("/")[0]
            paths = [match for match in cast("list[str]", fs.glob(path)) if fs.isfile(match)]
            if not paths:
                raise SourceError(f"source {source}: {given} matches no file")
        elif fs.isdir(path):
            root = path.rstrip("/")
            paths = _rows_below(source, root, cast("list[str]", fs.find(path)))
        else:
            raise SourceError(f"source {source}: there is no file or folder {given}")
    except (OSError, ValueError, ImportError) as error:
        raise SourceError(f"source {source}: {given} cannot be looked up: {_reason(error)}") from None
    for found in paths:
        name = found[len(root) :].lstrip("/") if found.startswith(root) else found.rpartition("/")[2]
        yield SourceFile(name=name, kind=_kind(source, name), path=found, fs=fs, root=root.rpartition("/")[2])


def _rows_below(source: str, root: str, paths: list[str]) -> list[str]:
    """The files of a folder that can hold rows: of a known suffix, not hidden, not a note of `datasets`."""
    rows = [
        path
        for path in paths
        if _suffix(path) in KINDS
        and path.rpartition("/")[2] not in NOT_DATA
        and not any(part.startswith((".", "_")) for part in path[len(root) :].split("/"))
    ]
    if not rows:
        seen = ", ".join(path.rpartition("/")[2] for path in paths[:5]) or "nothing"
        raise SourceError(f"source {source}: folder {root} holds no file of {', '.join(KINDS)} (found: {seen})")
    return rows


def _kind(source: str, name: str) -> str:
    kind = KINDS.get(_suffix(name))
    if kind is None:
        raise SourceError(
            f"source {source}: {name} is of no known kind; known are {', '.join(KINDS)}, the text ones also with "
            f"{', '.join(PACKED)}"
        )
    return kind


def _suffix(path: str) -> str:
    pure = PurePosixPath(path.partition("?")[0])
    if pure.suffix.lower() in PACKED:
        inner = PurePosixPath(pure.stem).suffix.lower()
        return inner if KINDS.get(inner) in ("lines", "json", "csv") else pure.suffix
    return pure.suffix.lower()


def _below_root(file: SourceFile) -> SourceFile:
    return SourceFile(name=f"{file.root}/{file.name}", kind=file.kind, path=file.path, fs=file.fs, root=file.root)


def _decompressed(raw: BinaryIO, packing: str | None) -> Any:
    if packing == "gzip":
        return gzip.GzipFile(fileobj=raw)
    return pa.CompressedInputStream(pa.PythonFile(raw, mode="r"), packing) if packing else raw


def _reason(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0] or type(error).__name__
