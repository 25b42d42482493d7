"""The canonical pair, and the rules that let one in.

A pair is one history that both sides share, with a chosen and a rejected completion. The history is found, not
declared: it is the longest common prefix, in whole messages, of the two conversations. So a row that states its prompt
apart, a row whose sides are full conversations and a row that does both come out as one and the same pair, and no turn
that both sides share is ever scored. A row that breaks a rule becomes a `Rejection` with a reason code, a locator and
a detail; it is never mended, cut or dropped in silence. Cost: one comparison of each shared message.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

REASONS: dict[str, str] = {
    "truncated": "file ends inside a record",
    "broken_json": "line is not JSON",
    "broken_csv": "row does not have the header's cells",
    "not_utf8": "line is not UTF-8",
    "not_an_object": "row is not an object with columns",
    "missing_field": "column is missing",
    "null": "field is null",
    "empty": "field is empty",
    "not_text": "content is not text",
    "bad_unicode": "text holds half of a surrogate pair",
    "bad_message": "turn is not an object with a role and a content",
    "unknown_role": "role is unknown",
    "bad_tools": "tools are not a list of JSON objects",
    "bad_tool_call": "tool call is not an object with a name and arguments",
    "role_order": "turns are out of order",
    "prompt_differs": "prompt column differs from the first turn",
    "system_differs": "system column differs from the system turn",
    "no_shared_prompt": "sides share no prompt",
    "prompt_ends_with_assistant": "prompt ends with an assistant turn",
    "completion_end": "completion does not end with an assistant turn",
    "identical": "chosen and rejected are the same",
    "prefix": "one side is the beginning of the other",
    "tie": "neither answer is preferred",
    "bad_label": "label names neither answer",
    "bad_score": "score is not a number",
    "too_few": "fewer than two completions",
    "template_refuses": "chat template refuses the conversation",
    "template_rewrites": "chat template leaves no border to cut at",
    "not_one_turn": "text rendering needs one user and one assistant turn",
    "control_text": "vocabulary cannot write a control token as plain text",
    "identical_tokens": "both sides become the same tokens",
    "too_long": "a side is longer than max_tokens",
    "prompt_too_long": "prompt leaves no room for an answer",
    "answer_too_long": "answer leaves no room for the prompt",
    "no_target": "a side has no token to learn",
}
"""Why a row was not let in: code to sentence. docs/formats.md explains each."""

FOLLOWERS = {
    None: ("system", "user"),
    "system": ("user",),
    "user": ("assistant",),
    "assistant": ("user", "tool"),
    "tool": ("tool", "assistant"),
}
"""Which roles may follow a role; None stands for the start of a conversation."""

MAY_BE_EMPTY = ("system", "tool")
"""An empty system turn switches a template's own off, and a tool may return nothing; other turns must say something."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """One turn of a conversation."""

    role: str
    """One of system, user, assistant, tool."""
    content: str
    """Text; blank only in a system or tool turn, or beside tool calls."""
    name: str | None = None
    tool_calls: tuple[dict[str, Any], ...] = ()
    """`{"type": "function", "function": {"name", "arguments"}}`, the arguments exactly as the row wrote them."""
    tool_call_id: str | None = None
    """Which call a tool turn answers, for templates that print it."""
    reasoning_content: str | None = None
    """Thoughts kept apart from the content, for templates that print them."""

    def to_dict(self) -> dict[str, Any]:
        """The message as a chat template takes it; a field without a value is absent, never null."""
        fields: dict[str, Any] = {"role": self.role, "content": self.content}
        if self.name is not None:
            fields["name"] = self.name
        if self.tool_calls:
            fields["tool_calls"] = list(self.tool_calls)
        if self.tool_call_id is not None:
            fields["tool_call_id"] = self.tool_call_id
        if self.reasoning_content is not None:
            fields["reasoning_content"] = self.reasoning_content
        return fields

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> Message:
        """The inverse of `to_dict`."""
        given: dict[str, Any] = {**fields, "tool_calls": tuple(fields.get("tool_calls", ()))}
        return cls(**given)


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """A preference: the history both sides share, and how each goes on from it."""

    prompt: tuple[Message, ...]
    """Ends with a user or tool turn."""
    chosen: tuple[Message, ...]
    """Begins and ends with an assistant turn, as `rejected` does; the first messages of the two differ."""
    rejected: tuple[Message, ...]
    tools: tuple[dict[str, Any], ...] = ()
    """Functions offered to both sides."""
    source: str
    locator: str
    """Where the pair lies in its source: file and line, or file and row."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rejection:
    """A row, or one combination of a row's answers, that was not let in."""

    source: str
    locator: str
    reason: str
    """A code of `REASONS`."""
    detail: str
    """The field and the rule it breaks, such as `field rejected: null`."""
    row: str | None = None
    """The row as it was read: JSON text, or the line itself where it is not JSON."""


class Refused(Exception):
    """Carries a rule's verdict on a row up to where the row's `Rejection` is made; never leaves this package."""

    def __init__(self, reason: str, detail: str) -> None:
        assert reason in REASONS, reason
        super().__init__(reason, detail)
        self.reason = reason
        self.detail = detail.encode("utf-8", "backslashreplace").decode()


def make_pair(
    prompt: Sequence[Message],
    chosen: Sequence[Message],
    rejected: Sequence[Message],
    *,
    tools: Sequence[dict[str, Any]] = (),
    source: str,
    locator: str,
) -> Pair | Rejection:
    """Judge two conversations, `prompt + chosen` and `prompt + rejected`, and split them where they part.

    `prompt` may be empty: the shared history is found either way.
    """
    try:
        history, ours, theirs = split(prompt, chosen, rejected)
    except Refused as refusal:
        return Rejection(source=source, locator=locator, reason=refusal.reason, detail=refusal.detail)
    return Pair(prompt=history, chosen=ours, rejected=theirs, tools=tuple(tools), source=source, locator=locator)


def split(
    prompt: Sequence[Message], chosen: Sequence[Message], rejected: Sequence[Message]
) -> tuple[tuple[Message, ...], tuple[Message, ...], tuple[Message, ...]]:
    """(shared history, chosen completion, rejected completion) of `prompt + chosen` and `prompt + rejected`.

    Raises:
        Refused: a rule of the pair is broken.
    """
    for field, turns in (("prompt", prompt), ("chosen", chosen), ("rejected", rejected)):
        _check_texts(field, turns)
    ours, theirs = (*prompt, *chosen), (*prompt, *rejected)
    shared = len(prompt)
    for left, right in zip(chosen, rejected, strict=False):
        if not same(left, right):
            break
        shared += 1
    history, ours, theirs = ours[:shared], ours[shared:], theirs[shared:]
    _check_borders(history, ours, theirs)
    _check_order("chosen", history, ours)
    _check_order("rejected", history, theirs)
    return history, ours, theirs


def speaks(message: Message) -> bool:
    """Whether a message says what its role must say; blanks alone say nothing."""
    return bool(message.tool_calls) or message.role in MAY_BE_EMPTY or bool(message.content.strip())


def same(left: Message, right: Message) -> bool:
    """Whether two messages are the same text; Python calls calls with 1, 1.0 and True as an argument equal."""
    return left == right and (not left.tool_calls or json.dumps(left.tool_calls) == json.dumps(right.tool_calls))


def place(field: str, index: int, turns: Sequence[Message]) -> str:
    """How a detail names a turn of a field: `field chosen`, or `field chosen, turn 2` where there are several."""
    return f"field {field}" if len(turns) == 1 else f"field {field}, turn {index + 1}"


def _check_texts(field: str, turns: Sequence[Message]) -> None:
    if not turns and field != "prompt":
        raise Refused("empty", f"field {field}: empty")
    for index, turn in enumerate(turns):
        if turn.role not in FOLLOWERS:
            raise Refused("unknown_role", f"{place(field, index, turns)}: role {turn.role!r} is unknown")
        if not speaks(turn):
            raise Refused("empty", f"{place(field, index, turns)}: empty")


def _check_borders(history: Sequence[Message], chosen: Sequence[Message], rejected: Sequence[Message]) -> None:
    if not chosen and not rejected:
        raise Refused("identical", "fields chosen and rejected: the same messages, so there is nothing to prefer")
    if not chosen or not rejected:
        short, long = ("chosen", "rejected") if not chosen else ("rejected", "chosen")
        raise Refused("prefix", f"field {short}: the beginning of {long}, so {short} has no completion of its own")
    if not any(turn.role != "system" for turn in history):
        raise Refused("no_shared_prompt", "fields chosen and rejected: part before any user turn that both share")
    if history[-1].role == "assistant":
        raise Refused(
            "prompt_ends_with_assistant",
            f"field prompt: turn {len(history)}, the last that both sides share, is an assistant turn; "
            "the next must be the assistant's",
        )


def _check_order(field: str, history: Sequence[Message], completion: Sequence[Message]) -> None:
    turns, before = (*history, *completion), None
    for index, turn in enumerate(turns):
        if turn.role not in FOLLOWERS[before]:
            wanted = " or ".join(FOLLOWERS[before])
            after = f"after {before}" if before else "at the start"
            raise Refused(
                "role_order", f"field {field}, turn {index + 1}: {turn.role} {after}, where {wanted} may stand"
            )
        before = turn.role
    if before != "assistant":
        raise Refused("completion_end", f"field {field}: ends with a {before} turn, must end with an assistant turn")
