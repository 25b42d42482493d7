"""Formats whose rows say which answer is chosen: explicit and implicit prompt, ShareGPT, Alpaca, lists of answers."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import cast

from training.data.formats.drafts import Draft, Field, Record, field
from training.data.formats.messages import kind, text
from training.data.pair import Message, Refused


def explicit(record: Record, columns: tuple[str, ...]) -> Iterator[Draft]:
    """A prompt beside two answers, each a text or messages; lists of answers give every chosen with every rejected."""
    prompt, chosen, rejected = (field(record, name) for name in columns)
    for ours, theirs, part in combinations(chosen, rejected):
        yield Draft(prompt=prompt, chosen=ours, rejected=theirs, part=part)


def implicit(record: Record, columns: tuple[str, ...]) -> Iterator[Draft]:
    """Two whole conversations that share a history, as messages or as hh-rlhf transcripts."""
    chosen, rejected = (field(record, name) for name in columns)
    yield Draft(prompt=None, chosen=chosen, rejected=rejected)


def alpaca(record: Record, columns: tuple[str, ...]) -> Iterator[Draft]:
    """An instruction, its input after a blank line, earlier rounds in `history`, and two answers."""
    instruction, chosen, rejected = (field(record, name) for name in columns)
    prompt = Field(name=instruction.name, value=instructed(instruction, record))
    for ours, theirs, part in combinations(chosen, rejected):
        yield Draft(prompt=prompt, chosen=ours, rejected=theirs, history=_rounds(record.get("history")), part=part)


def instructed(instruction: Field, record: Record) -> object:
    """The instruction with the row's `input` after a blank line, where there is one."""
    given = record.get("input")
    if given is None or given == "" or not isinstance(instruction.value, str):
        return instruction.value
    return f"{instruction.value}\n\n{text('input', given)}"


def combinations(chosen: Field, rejected: Field) -> Iterator[tuple[Field, Field, str]]:
    """Every chosen with every rejected answer, and the name of the combination where a row holds lists of answers."""
    ours, theirs = _alternatives(chosen), _alternatives(rejected)
    if ours is None and theirs is None:
        yield chosen, rejected, ""
        return
    for i, j in product(range(len(ours or [chosen])), range(len(theirs or [rejected]))):
        part = f" (chosen {i + 1}, rejected {j + 1})"
        yield (ours or [chosen])[i], (theirs or [rejected])[j], part


def _alternatives(answers: Field) -> list[Field] | None:
    """The answers of a list of answers; None for one answer, be it a text or a list of messages."""
    if not isinstance(answers.value, list):
        return None
    items = cast("list[object]", answers.value)
    if not items:
        raise Refused("empty", f"field {answers.name}: empty list")
    if any(isinstance(item, dict) for item in items):
        return None
    return [Field(name=f"{answers.name}[{i}]", value=item) for i, item in enumerate(items)]


def _rounds(history: object) -> tuple[Message, ...]:
    if not history:
        return ()
    if not isinstance(history, list):
        raise Refused("bad_message", f"field history: {kind(history)}, not a list of [question, answer]")
    turns: list[Message] = []
    for index, given in enumerate(cast("list[object]", history)):
        if not isinstance(given, list) or len(cast("list[object]", given)) != 2:
            raise Refused("bad_message", f"field history[{index}]: not [question, answer]")
        question, answer = cast("list[object]", given)
        turns.append(Message(role="user", content=text(f"history[{index}][0]", question)))
        turns.append(Message(role="assistant", content=text(f"history[{index}][1]", answer)))
    return tuple(turns)
