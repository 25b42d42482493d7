"""Formats whose rows must be judged first: labelled pairs, voted pairs, ranked or scored lists.

Rules, stated so that a pair can be checked by hand. A label names an answer by its column's ending, by its place, or as
`A>B`. Votes decide where more than half of all of them, ties counted, are for one answer. A list of scored answers
gives one pair, the best against the worst; the first of several equals stands for them. Equal answers are a tie, and a
tie is never a pair.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from typing import Any, cast

from training.data.formats.answers import instructed
from training.data.formats.drafts import Draft, Field, Record, field, short
from training.data.formats.messages import kind
from training.data.pair import Refused

PROMPTS = ("prompt", "question", "instruction", "input")
"""Columns that may hold the prompt of judged answers, by preference; `input` goes behind an `instruction`."""

VOTE = re.compile(r"annotator_?\d+")
"""Columns that hold one vote each."""

SCORES = ("overall_score", "score", "rating")
"""Keys of a scored answer, and (with an s) columns of scores beside a list of answers: more is better."""

RANK = "rank"
"""Key of a ranked answer, `ranks` as a column: less is better."""

ANSWERS = ("response", "text", "content", "completion", "answer", "output")
"""Keys under which a scored answer's text may lie."""

TIES = ("tie", "tie (bothbad)", "same", "equal", "both", "neither")

NAMED = re.compile(r"(?:[a-z]+[ _]?)?\(?([ab0-9])\)?")
ORDERED = re.compile(r"([ab0-9])\s*(>+|<+|=+)\s*([ab0-9])")


def labelled(record: Record, columns: tuple[str, ...]) -> Iterator[Draft]:
    """Two answers and a label, or two answers and votes."""
    first, second = (field(record, name) for name in columns[:2])
    if VOTE.fullmatch(columns[2]):
        won = _majority({name: side(f"field {name}", record[name], columns) for name in record if VOTE.fullmatch(name)})
    else:
        label = field(record, columns[2])
        if isinstance(label.value, list):
            votes = enumerate(cast("list[object]", label.value))
            won = _majority({f"{label.name}[{i}]": side(f"field {label.name}[{i}]", v, columns) for i, v in votes})
        else:
            won = side(f"field {label.name}", label.value, columns)
            if won is None:
                raise Refused("tie", f"field {label.name}: {label.value!r} prefers neither answer")
    chosen, rejected = (first, second) if won == 0 else (second, first)
    yield Draft(prompt=_prompt(record), chosen=chosen, rejected=rejected)


def ranked(record: Record, columns: tuple[str, ...]) -> Iterator[Draft]:
    """A list of answers with their scores or ranks: the best against the worst."""
    answers = field(record, columns[0])
    listed = _list(answers.value)
    if not isinstance(listed, list):
        raise Refused("null" if listed is None else "too_few", f"field {answers.name}: {kind(listed)}, not a list")
    items = cast("list[object]", listed)
    if len(items) < 2:
        raise Refused("too_few", f"field {answers.name}: {len(items)} of at least 2 completions")
    scores = _scores(record, answers.name, items)
    best, worst = scores.index(max(scores)), scores.index(min(scores))
    if scores[best] == scores[worst]:
        raise Refused("tie", f"field {answers.name}: all {len(items)} completions score {abs(scores[best]):g}")
    yield Draft(
        prompt=_prompt(record), chosen=_answer(answers.name, best, items), rejected=_answer(answers.name, worst, items)
    )


def side(where: str, label: object, columns: tuple[str, ...]) -> int | None:
    """0 for the first answer, 1 for the second, None for a tie.

    Endings are those of the answers' columns: with `output_0` and `output_1` a label 1 is the second answer, with
    `output_1` and `output_2` it is the first and 0 is a tie.

    Raises:
        Refused: the label is neither.
    """
    endings = [columns[0][-1].lower(), columns[1][-1].lower()]
    names = {"a": 0, "b": 1, **({} if endings == ["0", "1"] else {"1": 0, "2": 1}), endings[0]: 0, endings[1]: 1}
    if isinstance(label, float) and label.is_integer():
        label = int(label)
    given = "" if label is None or isinstance(label, bool | list | dict) else str(label).strip().lower()
    if given in TIES or (given == "0" and "0" not in names):
        return None
    if (order := ORDERED.fullmatch(given)) and {order[1], order[3]} <= names.keys() and order[1] != order[3]:
        if order[2][0] == "=":
            return None
        return names[order[1]] if order[2][0] == ">" else names[order[3]]
    if (named := NAMED.fullmatch(given)) and named[1] in names:
        return names[named[1]]
    found = short(label) if isinstance(label, str) else "null" if label is None else json.dumps(label, default=str)
    raise Refused("bad_label", f"{where}: {found} names neither {columns[0]} nor {columns[1]}, and is no tie")


def _list(value: object) -> object:
    """The value; where it is text, as in CSV, the list that its JSON says."""
    try:
        return json.loads(value) if isinstance(value, str) else value
    except (ValueError, RecursionError):
        return value


def _majority(votes: dict[str, int | None]) -> int:
    given = list(votes.values())
    for candidate in (0, 1):
        if 2 * given.count(candidate) > len(given):
            return candidate
    counts = f"{given.count(0)} for the first, {given.count(1)} for the second, {given.count(None)} for a tie"
    raise Refused("tie", f"fields {', '.join(votes)}: {counts}; no answer has more than half")


def _prompt(record: Record) -> Field | None:
    name = next((name for name in PROMPTS if record.get(name) is not None), None)
    if name is None:
        return None
    prompt = Field(name=name, value=record[name])
    return Field(name=name, value=instructed(prompt, record)) if name == "instruction" else prompt


def _scores(record: Record, name: str, items: list[object]) -> list[float]:
    """One number an answer, more is better."""
    for key in (*SCORES, RANK):
        beside = _list(record.get(f"{key}s"))
        if isinstance(beside, list):
            column = cast("list[object]", beside)
            if len(column) != len(items):
                raise Refused("bad_score", f"field {key}s: {len(column)} values for {len(items)} of {name}")
            return [_number(f"{key}s[{i}]", value, key) for i, value in enumerate(column)]
    return [_own_score(f"{name}[{i}]", item) for i, item in enumerate(items)]


def _own_score(where: str, item: object) -> float:
    given = cast("dict[str, Any]", item) if isinstance(item, dict) else {}
    key = next((key for key in (*SCORES, RANK) if key in given), None)
    if key is None:
        raise Refused("bad_score", f"field {where}: none of {', '.join((*SCORES, RANK))}")
    return _number(f"{where}.{key}", given[key], key)


def _number(where: str, value: object, key: str) -> float:
    try:
        number = math.nan if isinstance(value, bool) else float(cast("Any", value))
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not math.isfinite(number):
        raise Refused("bad_score", f"field {where}: {json.dumps(value, default=str)} is not a number")
    return -number if key == RANK else number


def _answer(name: str, index: int, items: list[object]) -> Field:
    where, item = f"{name}[{index}]", items[index]
    if not isinstance(item, dict):
        return Field(name=where, value=item)
    given = cast("dict[str, Any]", item)
    key = next((key for key in ANSWERS if key in given), None)
    if key is None:
        raise Refused("missing_field", f"field {where}: none of {', '.join(ANSWERS)} (keys: {', '.join(given)})")
    return Field(name=f"{where}.{key}", value=given[key])
