"""Datasets of the Hugging Face hub, or of a folder laid out like one: `hf://NAME@REVISION?config=…&split=…`.

`datasets` fetches, caches and maps the rows. Their identity is their content like that of any source: a hash of the
rows, so a revision that moves without changing a row changes nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from urllib.parse import parse_qsl

import pyarrow as pa

from training.data.fingerprint import canonical_json, fp
from training.errors import SourceError

SCHEME = "hf://"
FILES = ("hf://datasets/", "hf://spaces/", "hf://buckets/")
"""URLs under these name single files, which fsspec opens."""

ROWS = 512


def is_hub(given: str) -> bool:
    """Whether an input names a whole dataset."""
    return given.startswith(SCHEME) and not given.startswith(FILES)


def load(source: str, given: str) -> tuple[str, Any]:
    """(name for locators, `datasets.Dataset`) of an input.

    Without a split the dataset must have a `train` split or only one.

    Raises:
        SourceError: it cannot be loaded, or its split is not told.
    """
    import datasets

    address, _, query = given.removeprefix(SCHEME).partition("?")
    name, _, revision = address.partition("@")
    options = dict(parse_qsl(query))
    if unknown := options.keys() - {"config", "split"}:
        raise SourceError(
            f"source {source}: {given}: unknown option {', '.join(sorted(unknown))}; known: config, split"
        )
    try:
        found = datasets.load_dataset(
            name, options.get("config"), revision=revision or None, split=options.get("split")
        )
    except Exception as error:  # the library raises its own, the hub client's and plain errors, with no common base
        reason = str(error).strip().partition("\n")[0] or type(error).__name__
        raise SourceError(f"source {source}: {given} cannot be loaded: {reason}") from None
    if not isinstance(found, datasets.Dataset):
        splits = list(map(str, found))
        split = "train" if "train" in splits else splits[0] if len(splits) == 1 else None
        if split is None:
            raise SourceError(f"source {source}: {given} has splits {', '.join(splits)}; name one with ?split=NAME")
        found = found[split]
    return f"{name.rstrip('/').rpartition('/')[2]}/{found.split}", found


def batches(dataset: Any, rows: int = ROWS) -> Iterator[pa.RecordBatch]:
    """The dataset's rows as record batches."""
    for table in dataset.with_format("arrow").iter(batch_size=rows):
        yield from table.combine_chunks().to_batches()


def fingerprint(dataset: Any) -> str:
    """`file1:…` of the rows' values in order."""
    return fp("file", *(fp("file", *map(_text, batch.to_pylist())) for batch in batches(dataset)))


def _text(record: dict[str, Any]) -> bytes:
    return canonical_json({name: value if _plain(value) else repr(value) for name, value in record.items()})


def _plain(value: Any) -> bool:
    if isinstance(value, list):
        return all(map(_plain, value))
    if isinstance(value, dict):
        return all(map(_plain, value.values()))
    return value is None or isinstance(value, str | int | float)
