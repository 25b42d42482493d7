"""Rows of every shape, and sources of a few rows: written, opened, parsed in two lines."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from training.data.pair import Message, Pair, Rejection
from training.data.sources import SourceSpec, chunks, open_source, parse

U = {"role": "user", "content": "q"}
X, Y = {"role": "assistant", "content": "x"}, {"role": "assistant", "content": "y"}
HUMAN, GPT = {"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}

SHAPES: list[tuple[str, dict[str, Any], str]] = [
    ("explicit", {"prompt": "q", "chosen": "x", "rejected": "y"}, "u:q | a:x | a:y"),
    ("explicit", {"question": "q", "chosen": "x", "rejected": "y", "system": "b"}, "s:b u:q | a:x | a:y"),
    ("explicit", {"prompt": [U], "chosen": [X], "rejected": [Y]}, "u:q | a:x | a:y"),
    ("explicit", {"prompt": [U], "chosen": X, "rejected": "y"}, "u:q | a:x | a:y"),
    ("explicit", {"prompt": "q", "chosen": [U, X], "rejected": [U, Y]}, "u:q | a:x | a:y"),
    ("explicit", {"prompt": "q", "chosen": [U, X], "rejected": [Y]}, "u:q | a:x | a:y"),
    ("explicit", {"prompt": "\n\nHuman: q\n\nAssistant:", "chosen": " x", "rejected": " y"}, "u:q | a: x | a: y"),
    ("implicit", {"chosen": [U, X], "rejected": [U, Y]}, "u:q | a:x | a:y"),
    ("implicit", {"chosen_messages": [U, X], "rejected_messages": [U, Y]}, "u:q | a:x | a:y"),
    ("implicit", {"chosen": [HUMAN, {"from": "gpt", "value": "x"}], "rejected": [U, Y]}, "u:q | a:x | a:y"),
    (
        "implicit",
        {
            "chosen": "\n\nHuman: q\n\nAssistant: a\n\nHuman: and\n\nso?\n\nAssistant: x",
            "rejected": "\n\nHuman: q\n\nAssistant: a\n\nHuman: and\n\nso?\n\nAssistant:  y",
        },
        "u:q a:a u:and\n\nso? | a:x | a: y",
    ),
    ("sharegpt", {"conversations": [HUMAN], "chosen": GPT, "rejected": "y"}, "u:q | a:a | a:y"),
    (
        "sharegpt",
        {"conversations": [{"from": "system", "value": "b"}, HUMAN, GPT, HUMAN], "chosen": [GPT], "rejected": [Y]},
        "s:b u:q a:a u:q | a:a | a:y",
    ),
    ("alpaca", {"instruction": "do", "input": "it", "chosen": "x", "rejected": "y"}, "u:do\n\nit | a:x | a:y"),
    (
        "alpaca",
        {"instruction": "q", "input": "", "history": [["1", "2"]], "system": "b", "chosen": "x", "rejected": "y"},
        "s:b u:1 a:2 u:q | a:x | a:y",
    ),
    ("labelled", {"input": "q", "output_1": "y", "output_2": "x", "label": 2}, "u:q | a:x | a:y"),
    (
        "labelled",
        {"question": "q", "response_A": "x", "response_B": "y", "label": "A>B"},
        "u:q | a:x | a:y",
    ),
    (
        "labelled",
        {"conversation_a": [U, Y], "conversation_b": [U, X], "winner": "model_b"},
        "u:q | a:x | a:y",
    ),
    (
        "labelled",
        {
            "instruction": "do",
            "input": "it",
            "response1": "x",
            "response2": "y",
            "annotator1": 1,
            "annotator2": 0,
            "annotator3": 1,
        },
        "u:do\n\nit | a:x | a:y",
    ),
    ("labelled", {"prompt": "q", "output_a": "x", "output_b": "y", "votes": ["a", "b", "a"]}, "u:q | a:x | a:y"),
    (
        "ranked",
        {
            "instruction": "q",
            "completions": [
                {"response": "m", "overall_score": 5},
                {"response": "x", "overall_score": "8.5"},
                {"response": "y", "overall_score": 1},
                {"response": "z", "overall_score": 8.5},
            ],
        },
        "u:q | a:x | a:y",
    ),
    ("ranked", {"prompt": "q", "responses": ["y", "x", "m"], "ranks": [3, 1, 2]}, "u:q | a:x | a:y"),
    ("ranked", {"prompt": "q", "completions": [{"text": "x", "rank": 1}, {"text": "y", "rank": 2}]}, "u:q | a:x | a:y"),
    (
        "implicit",
        {
            "chosen": [{"role": "user", "content": [{"type": "text", "value": "q"}]}, X],
            "rejected": [{"role": "user", "content": [{"type": "text", "text": "q"}]}, Y],
        },
        "u:q | a:x | a:y",
    ),
]
"""(format, row, what the row says): every shape of row there is."""


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
