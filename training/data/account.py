"""The account of a preparation: results go in, in order; shards, quarantine, fingerprint and exact counts come out."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from blake3 import blake3

from training.data.fingerprint import DatasetHasher, file_fingerprint
from training.data.manifest import QUARANTINE, Manifest, StoredFile
from training.data.pair import REASONS, Rejection
from training.data.recipe import Recipe
from training.data.shards import PARTS, ShardWriter, lengths, true_values
from training.data.tokenize import Notes
from training.data.tokenizer import Tokenizer
from training.data.workers import Done
from training.errors import SourceError

SHOWN = 5
"""Refused rows that an error spells out."""


class Account:
    """Takes results in order: appends to shards and quarantine, hashes and counts."""

    def __init__(self, staging: Path, inputs: dict[str, str], shard_bytes: int) -> None:
        self.rows = self.pairs = 0
        self._shards = ShardWriter(staging, inputs, limit=shard_bytes)
        self._quarantine = (staging / QUARANTINE).open("w", encoding="utf-8")
        self._hasher = DatasetHasher(**{name: inputs[name] for name in ("tokenizer", "template", "recipe")})
        self._reasons: Counter[str] = Counter()
        self._first: list[Rejection] = []
        self._notes = Notes()
        self._tokens: Counter[str] = Counter()
        self._cut: Counter[str] = Counter()
        self._seen: set[int] = set()
        self._twins: Counter[str] = Counter({"same": 0, "swapped": 0})

    def close(self) -> None:
        """Let go of the files, finished or not."""
        self._quarantine.close()
        self._shards.close()

    def take(self, done: Done) -> None:
        """Add a chunk's result."""
        batch = pa.ipc.open_stream(done.batch).read_next_batch()
        self.rows += done.rows
        self.pairs += batch.num_rows
        self._shards.add(batch)
        self._hash(batch)
        self._count(batch)
        self._notes += done.notes
        self._first += done.refused[: SHOWN - len(self._first)]
        for refused in done.refused:
            self._reasons[refused.reason] += 1
            values = {name: getattr(refused, name) for name in ("source", "locator", "reason", "detail", "row")}
            self._quarantine.write(json.dumps(values, ensure_ascii=False) + "\n")

    def manifest(
        self, about: dict[str, Any], inputs: dict[str, str], tokenizer: Tokenizer, recipe: Recipe, max_quarantine: float
    ) -> Manifest:
        """Close the files and give the account of them.

        Raises:
            SourceError: no pair was let in, or more than `max_quarantine` of the outcomes were not.
        """
        self._quarantine.close()
        shards, refused = self._shards.finish(), sum(self._reasons.values())
        if not self.pairs or refused > max_quarantine * (self.pairs + refused):
            raise SourceError(self._refusal(about["name"], refused, max_quarantine))
        path = Path(self._quarantine.name)
        return Manifest(
            fingerprint=self._hasher.fingerprint(),
            inputs=inputs,
            rendering=recipe.rendering,
            max_tokens=recipe.max_tokens,
            overflow=recipe.overflow,
            date=recipe.date,
            tokenizer_path=str(Path(tokenizer.path).resolve()),
            switched_off=tokenizer.switched_off,
            vocab_size=tokenizer.vocab_size,
            pad_id=tokenizer.pad_id,
            source=about,
            counts={
                "rows": self.rows,
                "pairs": self.pairs,
                "quarantined": refused,
                "reasons": dict(sorted(self._reasons.items())),
                "notes": dict(sorted(self._notes.counts.items())),
                "cut": {name: self._cut[name] for name in ("pairs", *PARTS)},
                "duplicates": dict(self._twins),
            },
            tokens={name: self._tokens[name] for name in (*PARTS, "source", "logical", "loss")},
            shards=shards,
            quarantine=StoredFile(
                file=QUARANTINE, rows=refused, tokens=0, bytes=path.stat().st_size, digest=file_fingerprint(path)
            ),
        )

    def _refusal(self, name: str, refused: int, max_quarantine: float) -> str:
        outcomes = self.pairs + refused
        reasons = ", ".join(f"{REASONS[code]} ({count})" for code, count in self._reasons.most_common())
        first = "; ".join(f"{row.locator}: {row.detail}" for row in self._first)
        allowed = "" if not self.pairs else f", and at most {max_quarantine:.1%} may be (--max-quarantine)"
        return f"source {name}: {refused} of {outcomes} rows dropped{allowed}: {reasons or 'no rows'}; first: {first}"

    def _hash(self, batch: pa.RecordBatch) -> None:
        ids = [_cells(batch.column(f"{part}_ids")) for part in PARTS]
        masks = [_cells(batch.column(f"{side}_mask")) for side in PARTS[1:]]
        cuts = zip(*(batch.column(f"{part}_cut").to_pylist() for part in PARTS), strict=True)
        names = batch.column("pair_id").to_pylist()
        for name, tokens, supervised, cut in zip(
            names, zip(*ids, strict=True), zip(*masks, strict=True), cuts, strict=True
        ):
            self._hasher.add(name, tokens, supervised, cut)
            self._twin(tokens)

    def _twin(self, ids: tuple[np.ndarray, ...]) -> None:
        """Count a pair seen before, and one whose two answers were seen the other way round."""
        prompt, *sides = (tokens.tobytes() for tokens in ids)
        low, high = sorted(sides)
        hasher = blake3(len(prompt).to_bytes(8, "little") + prompt)
        hasher.update(len(low).to_bytes(8, "little") + low + high)
        key = int.from_bytes(hasher.digest(8), "little") & ~1 | (sides[0] == low)
        self._twins["same"] += key in self._seen
        self._twins["swapped"] += key ^ 1 in self._seen
        self._seen.add(key)

    def _count(self, batch: pa.RecordBatch) -> None:
        tokens = {part: lengths(batch.column(f"{part}_ids")) for part in PARTS}
        masked = {side: true_values(batch.column(f"{side}_mask")) for side in PARTS[1:]}
        self._tokens.update({part: int(counted.sum()) for part, counted in tokens.items()})
        total = {part: int(counted.sum()) for part, counted in tokens.items()}
        self._tokens["source"] += sum(total.values())
        self._tokens["logical"] += sum(total.values()) + total["prompt"]
        for side, counted in masked.items():
            self._tokens["loss"] += int(np.where(counted < 0, tokens[side], counted).sum())
        cuts = {part: batch.column(f"{part}_cut").to_numpy() for part in PARTS}
        self._cut.update({part: int(cut.sum()) for part, cut in cuts.items()})
        self._cut["pairs"] += int(np.any([cut > 0 for cut in cuts.values()], axis=0).sum())


def _cells(lists: pa.ListArray) -> list[Any]:
    """Each list of a column as a view of its values, None of a null."""
    values = lists.values.to_numpy(zero_copy_only=False)
    offsets, null = lists.offsets.to_pylist(), lists.is_null().to_pylist()
    return [None if null[i] else values[offsets[i] : offsets[i + 1]] for i in range(len(null))]
