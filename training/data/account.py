"""The account of a preparation: results go in, in order; shards, quarantine, fingerprint and exact counts come out.

Whenever a shard is finished, the journal says so. An account that is opened where a killed run left one goes on from
the last shard that is whole: its rows are counted and hashed again, a hundred times faster than they were made, and
what comes out is what an unbroken run gives, byte for byte.
"""

from __future__ import annotations

import json
from collections import Counter
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from blake3 import blake3

from training.data import journal
from training.data.fingerprint import DatasetHasher, file_fingerprint
from training.data.journal import Mark
from training.data.manifest import QUARANTINE, Manifest, StoredFile
from training.data.pair import REASONS
from training.data.recipe import Recipe
from training.data.shards import PARTS, ShardWriter, lengths, true_values
from training.data.tokenize import Notes
from training.data.tokenizer import Tokenizer
from training.data.workers import Done
from training.errors import SourceError

SHOWN = 5
"""Refused rows that an error spells out."""


class Account:
    """Takes results in order: appends to shards and quarantine, hashes and counts.

    `chunks` is how many have been taken; where it is not 0 at the beginning, an earlier run has finished `shards`.
    """

    def __init__(self, staging: Path, inputs: dict[str, str], shard_bytes: int) -> None:
        marks = journal.recover(staging)
        self._staging = staging
        self._hasher = DatasetHasher(**{name: inputs[name] for name in ("tokenizer", "template", "recipe")})
        self._tokens: Counter[str] = Counter()
        self._cut: Counter[str] = Counter()
        self._seen: set[int] = set()
        self._twins: Counter[str] = Counter({"same": 0, "swapped": 0})
        self.pairs = 0
        for mark in marks:
            self._replay(staging / mark.shard.file)
        self.shards = len(marks)
        last = marks[-1] if marks else None
        self.chunks, self.rows, self._into = (last.chunks, last.rows, last.into) if last else (0, 0, 0)
        self._reasons = Counter(last.reasons if last else {})
        self._notes = Notes(last.notes if last else {})
        self._marked = last.quarantine_bytes if last else 0
        self._shards = ShardWriter(staging, inputs, limit=shard_bytes, finished=[mark.shard for mark in marks])
        self._quarantine = (staging / QUARANTINE).open("ab")
        self._quarantine.truncate(self._marked)
        self._quarantine.seek(self._marked)

    def close(self) -> None:
        """Let go of the files, finished or not."""
        self._quarantine.close()
        self._shards.close()

    def take(self, done: Done) -> None:
        """Add a chunk's result."""
        batch = pa.ipc.open_stream(done.batch).read_next_batch()
        begun, self._into = self._into, 0
        rest = batch.slice(begun)
        for shard, row in self._shards.add(rest):
            self._mark(shard, begun + row)
        self._take(rest)
        self.chunks += 1
        self.rows += done.rows
        self._notes += done.notes
        for refused in done.refused:
            self._reasons[refused.reason] += 1
            values = {name: getattr(refused, name) for name in ("source", "locator", "reason", "detail", "row")}
            self._quarantine.write(json.dumps(values, ensure_ascii=False).encode() + b"\n")

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
        path = self._staging / QUARANTINE
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
        with (self._staging / QUARANTINE).open(encoding="utf-8") as lines:
            found = [json.loads(line) for line in islice(lines, SHOWN)]
        first = "; ".join(f"{row['locator']}: {row['detail']}" for row in found)
        allowed = "" if not self.pairs else f", and at most {max_quarantine:.1%} may be (--max-quarantine)"
        return f"source {name}: {refused} of {outcomes} rows dropped{allowed}: {reasons or 'no rows'}; first: {first}"

    def _mark(self, shard: StoredFile, into: int) -> None:
        """Note a finished shard, before anything of the chunk that it ends in is counted."""
        self._quarantine.flush()
        start, self._marked = self._marked, self._quarantine.tell()
        mark = Mark(
            shard=shard,
            chunks=self.chunks,
            into=into,
            rows=self.rows,
            reasons=dict(self._reasons),
            notes=dict(self._notes.counts),
            quarantine_bytes=self._marked,
            quarantine_digest=journal.quarantined(self._staging, start, self._marked),
        )
        journal.append(self._staging, mark)

    def _replay(self, shard: Path) -> None:
        with pa.memory_map(str(shard)) as mapped:
            reader = pa.ipc.open_file(mapped)
            for number in range(reader.num_record_batches):
                self._take(reader.get_batch(number))

    def _take(self, batch: pa.RecordBatch) -> None:
        self.pairs += batch.num_rows
        self._hash(batch)
        self._count(batch)

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
