"""All pairs that a plan may use, one row a pair, as plain columns of lengths and places.

The table is the plan's whole knowledge of its data: planning and packing never open a shard. 52 bytes a pair and its
id; 10 million pairs are about 1 GB.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from training.geometry import Layout

if TYPE_CHECKING:
    from training.data.shards import PairColumns

Choice = npt.NDArray[np.int64] | slice
"""Indices of a table's pairs."""

EVERY = slice(None)

NUMBERS = {
    "dataset": pa.int32(),
    "shard": pa.int32(),
    "row": pa.int32(),
    "prompt": pa.int32(),
    "chosen": pa.int32(),
    "rejected": pa.int32(),
    "chosen_loss": pa.int32(),
    "rejected_loss": pa.int32(),
    "source": pa.int32(),
    "prompt_key": pa.uint64(),
}
"""Number columns and their Arrow types, in the order in which they are written."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PairTable:
    """Pairs of all datasets, in the order of (dataset, shard, row); every array holds one entry a pair.

    `dataset` and `source` are codes into `datasets` (fingerprints, sorted) and `sources` (names). `prompt`, `chosen`,
    `rejected` are tokens, `chosen_loss` and `rejected_loss` the supervised ones among them; `prompt_key` is a hash of
    the prompt's tokens.
    """

    datasets: tuple[str, ...]
    sources: tuple[str, ...]
    dataset: npt.NDArray[np.int32]
    shard: npt.NDArray[np.int32]
    row: npt.NDArray[np.int32]
    prompt: npt.NDArray[np.int32]
    chosen: npt.NDArray[np.int32]
    rejected: npt.NDArray[np.int32]
    chosen_loss: npt.NDArray[np.int32]
    rejected_loss: npt.NDArray[np.int32]
    source: npt.NDArray[np.int32]
    prompt_key: npt.NDArray[np.uint64]
    pair_id: pa.ChunkedArray

    def __len__(self) -> int:
        return len(self.prompt)

    def where(self, keep: npt.NDArray[np.bool_]) -> PairTable:
        """The pairs where this mask is true."""
        numbers: dict[str, Any] = {name: getattr(self, name)[keep] for name in NUMBERS}
        return replace(self, pair_id=self.pair_id.filter(pa.array(keep)), **numbers)

    def tokens(self, layout: Layout, pairs: Choice = EVERY) -> npt.NDArray[np.int64]:
        """int64[pairs]: what each of these pairs takes in a pack."""
        prompts = 1 if layout == "shared" else 2
        return prompts * self.prompt[pairs].astype(np.int64) + self.chosen[pairs] + self.rejected[pairs]

    def first_of_each_pair(self) -> npt.NDArray[np.bool_]:
        """bool[pairs]: no earlier row holds the same pair."""
        encoded = self.pair_id.dictionary_encode()  # codes are given in order of first appearance
        codes = np.concatenate([np.empty(0, np.int32), *(chunk.indices.to_numpy() for chunk in encoded.chunks)])
        return np.diff(np.maximum.accumulate(codes), prepend=-1) > 0

    def to_arrow(self) -> pa.Table:
        """The columns, without the names behind the codes."""
        columns = {name: pa.array(getattr(self, name), type=kind) for name, kind in NUMBERS.items()}
        return pa.table({**columns, "pair_id": self.pair_id})

    @staticmethod
    def from_arrow(columns: pa.Table, *, datasets: tuple[str, ...], sources: tuple[str, ...]) -> PairTable:
        """The table that `to_arrow` wrote."""
        numbers: dict[str, Any] = {name: columns[name].to_numpy() for name in NUMBERS}
        return PairTable(datasets=datasets, sources=sources, pair_id=columns["pair_id"], **numbers)


def gather(parts: Sequence[tuple[str, PairColumns]]) -> PairTable:
    """One table of several datasets' columns, given by fingerprint and in any order; sources are joined by name."""
    parts = sorted(parts, key=lambda part: part[0])
    sources = tuple(sorted({name for _, columns in parts for name in columns.sources}))
    code = {name: i for i, name in enumerate(sources)}
    columns: dict[str, list[npt.NDArray[Any]]] = {name: [] for name in NUMBERS}
    for d, (_, part) in enumerate(parts):
        recoded = np.array([code[name] for name in part.sources], np.int32)[part.source_code]
        own = {"dataset": np.full(len(part.prompt), d, np.int32), "source": recoded}
        for name, found in columns.items():
            found.append(own[name] if name in own else getattr(part, name))
    numbers: dict[str, Any] = {
        name: np.concatenate(columns.pop(name)).astype(kind.to_pandas_dtype(), copy=False)
        for name, kind in NUMBERS.items()
    }
    ids = [part.pair_id.chunks if isinstance(part.pair_id, pa.ChunkedArray) else [part.pair_id] for _, part in parts]
    pair_id = pa.chunked_array([chunk for chunks in ids for chunk in chunks], type=pa.string())
    return PairTable(
        datasets=tuple(fingerprint for fingerprint, _ in parts), sources=sources, pair_id=pair_id, **numbers
    )
