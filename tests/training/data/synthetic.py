"""Prepared datasets made of lengths alone, for plans and packings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa

INPUTS = {"tokenizer": "tok1:00", "template": "tpl1:00", "recipe": "rec1:00"}


@dataclass
class Lengths:
    """A dataset of (prompt, chosen, rejected) lengths; pair i is called `NAME-i`, its locator `NAME.jsonl:i+1`."""

    name: str
    lengths: Sequence[tuple[int, int, int]]
    sources: Sequence[str] = ()
    pair_ids: Sequence[str] = ()
    prompts: Sequence[int] = ()
    max_tokens: int | None = None
    inputs: dict[str, str] = field(default_factory=lambda: dict(INPUTS))

    @property
    def fingerprint(self) -> str:
        return f"ds1:{self.name}"

    def columns(self) -> Any:
        n = len(self.lengths)
        prompt, chosen, rejected = np.array(self.lengths, np.int32).reshape(n, 3).T
        sources = list(self.sources) or [self.name] * n
        names = tuple(dict.fromkeys(sources))
        return SimpleNamespace(
            shard=(np.arange(n) // 1000).astype(np.int32),
            row=(np.arange(n) % 1000).astype(np.int32),
            prompt=prompt,
            chosen=chosen,
            rejected=rejected,
            chosen_loss=chosen,
            rejected_loss=rejected,
            source_code=np.array([names.index(source) for source in sources], np.int32),
            sources=names,
            pair_id=pa.array(list(self.pair_ids) or [f"{self.name}-{i}" for i in range(n)], pa.string()),
            prompt_key=np.array(self.prompts or range(n), np.uint64),
            locator=pa.array([f"{self.name}.jsonl:{i + 1}" for i in range(n)], pa.string()),
        )
