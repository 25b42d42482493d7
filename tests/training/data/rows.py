"""Sources of a few rows for tests: written, opened, parsed in two lines."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from training.data.pair import Message, Pair, Rejection
from training.data.sources import SourceSpec, chunks, open_source, parse


def write(path: Path, rows: Sequence[Any]) -> Path:
    """JSON lines; a row that is text is written as it is."""
    texts = [row if isinstance(row, str) else json.dumps(row, ensure_ascii=False) for row in rows]
    path.write_text("".join(text + "\n" for text in texts), encoding="utf-8")
    return path


def spec(*inputs: Path | str, format: str = "auto", mapping: Mapping[str, str] | None = None) -> SourceSpec:
    return SourceSpec(name="src", inputs=tuple(map(str, inputs)), format=format, mapping=mapping or {})


def read(
    *inputs: Path | str, format: str = "auto", mapping: Mapping[str, str] | None = None, rows: int = 512
) -> list[Pair | Rejection]:
    """Every outcome of a source, in order."""
    source = open_source(spec(*inputs, format=format, mapping=mapping))
    return [outcome for chunk in chunks(source, rows) for outcome in parse(chunk)]


def told(outcome: Pair | Rejection) -> str:
    """`u:q | a:x | a:y` for a pair, `reason @ locator` for a rejection."""
    if isinstance(outcome, Rejection):
        return f"{outcome.reason} @ {outcome.locator}"
    return " | ".join(" ".join(map(said, turns)) for turns in (outcome.prompt, outcome.chosen, outcome.rejected))


def said(message: Message) -> str:
    return f"{message.role[0]}:{message.content}"
