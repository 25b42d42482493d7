"""From a row's fields to the two conversations of a pair: one path for every format and for both sides.

A format only says which fields are the prompt and the two answers (`Draft`). How a text becomes a turn, how a prompt
column meets an answer that holds the whole conversation, and where a `system` column goes is decided here, once, for
both sides alike: a rule that reached one side by another path would make two prompts of one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from training.data.formats.messages import conversation, kind, text, tools
from training.data.pair import Message, Refused

Record = dict[str, Any]

MEDIA = ("image", "images", "video", "videos", "audio", "audios")
"""Columns of pictures and sound; a row that fills one cannot be told in text alone."""

BESIDE = ("system", "tools", *MEDIA)
"""Columns read beside those of any format."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Field:
    """A value of a row under the name a reader finds it by, such as `chosen[2]`."""

    name: str
    value: object


@dataclass(frozen=True, slots=True, kw_only=True)
class Draft:
    """What a format reads in a row: one pair to be."""

    prompt: Field | None
    """None where each answer holds its whole conversation."""
    chosen: Field
    rejected: Field
    history: tuple[Message, ...] = ()
    """Turns before the prompt."""
    part: str = ""
    """Which of a row's several pairs this is; follows the row's locator."""


def field(record: Record, name: str) -> Field:
    """A column of a row.

    Raises:
        Refused: the row lacks it.
    """
    if name not in record:
        raise Refused("missing_field", f"column {name}: missing (found: {', '.join(record)})")
    return Field(name=name, value=record[name])


def settle(draft: Draft, record: Record) -> tuple[tuple[Message, ...], tuple[Message, ...], tuple[dict[str, Any], ...]]:
    """(conversation with the chosen answer, conversation with the rejected answer, tools).

    Raises:
        Refused: a field is null, empty or not text, or a column disagrees with the turns.
    """
    for name in MEDIA:
        if record.get(name):
            raise Refused("not_text", f"field {name}: holds {kind(record[name])}; only text can be trained on")
    prompt = draft.history
    if draft.prompt is not None:
        prompt = (*prompt, *conversation(draft.prompt.name, draft.prompt.value, "user"))
    system = _system(record.get("system"))
    chosen, rejected = (_with_system(side.name, system, _join(side, prompt)) for side in (draft.chosen, draft.rejected))
    return chosen, rejected, tools("tools", record.get("tools"))


def _join(side: Field, prompt: tuple[Message, ...]) -> tuple[Message, ...]:
    """The side as a whole conversation: prompt and answer, or the answer itself where it begins with the prompt."""
    turns = conversation(side.name, side.value, "assistant")
    if turns[0].role == "assistant":
        if not prompt:
            raise Refused("no_shared_prompt", f"field {side.name}: an answer alone, and there is no prompt column")
        return (*prompt, *turns)
    if not prompt:
        return turns
    start = int(turns[0].role == "system" and prompt[0].role != "system")
    if turns[start : start + len(prompt)] != prompt:
        raise Refused("prompt_differs", _difference(side.name, prompt, turns[start:]))
    return turns


def _difference(name: str, prompt: Sequence[Message], turns: Sequence[Message]) -> str:
    first = next((i for i, (a, b) in enumerate(zip(prompt, turns, strict=False)) if a != b), len(turns))
    stated = short(prompt[first].content)
    found = short(turns[first].content) if first < len(turns) else "nothing"
    return f"prompt column differs from the first turn of field {name}: prompt has {stated}, {name} has {found}"


def _system(value: object) -> str | None:
    return None if value is None or value == "" else text("system", value)


def _with_system(name: str, system: str | None, turns: tuple[Message, ...]) -> tuple[Message, ...]:
    if system is None:
        return turns
    if turns[0].role != "system":
        return (Message(role="system", content=system), *turns)
    if turns[0].content != system:
        detail = f"system column has {short(system)}, the system turn of field {name} has {short(turns[0].content)}"
        raise Refused("system_differs", detail)
    return turns


def short(value: str) -> str:
    """A text as a detail quotes it."""
    return repr(value if len(value) <= 60 else value[:57] + "…")
