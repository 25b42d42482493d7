"""Messages from any spelling: `role`/`content` or `from`/`value`, content blocks, tool calls, hh-rlhf transcripts.

Only spellings change here, never text: what a message says comes out as the row wrote it. Each refusal names the field
by the path a reader finds it under in the row, such as `chosen[1].content`.
"""

from __future__ import annotations

import json
import re
from typing import Any, cast

from training.data.pair import Message, Refused, speaks

ROLES = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "human": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bot": "assistant",
    "model": "assistant",
    "tool": "tool",
    "function": "tool",
    "observation": "tool",
    "ipython": "tool",
    "tool_response": "tool",
    "function_call": "function_call",
    "tool_call": "function_call",
}
"""Role names in use, each with its canonical role; a `function_call` turn is an assistant turn whose text is a call."""

TRANSCRIPT = re.compile(r"\n\n(Human|Assistant):(?: |$|(?=\n))")
"""Turn markers of hh-rlhf; the one blank after the colon belongs to the marker."""


KINDS: dict[type, str] = {
    type(None): "null",
    bool: "true or false",
    int: "a number",
    float: "a number",
    str: "text",
    list: "a list",
    dict: "an object",
}
"""What a detail calls a value that is not what it should be."""


def conversation(field: str, value: object, role: str) -> tuple[Message, ...]:
    """The turns a field holds: a text (one turn of `role`), a transcript, one message, or a list of messages.

    Raises:
        Refused: null, empty, not text, a role that is unknown, a tool call that is none.
    """
    if isinstance(value, str):
        turns = transcript(value, role) if value.startswith("\n\nHuman:") else (Message(role=role, content=value),)
        for index, turn in enumerate(turns):
            where = field if len(turns) == 1 else f"{field}, turn {index + 1}"
            _check(where, turn)
        return turns
    if isinstance(value, dict):
        return (message(field, cast("dict[str, Any]", value)),)
    if isinstance(value, list):
        items = cast("list[object]", value)
        if not items:
            raise Refused("empty", f"field {field}: empty list")
        return tuple(message(f"{field}[{index}]", item) for index, item in enumerate(items))
    raise _no_text(field, value)


def transcript(text: str, role: str) -> tuple[Message, ...]:
    r"""Turns of `\n\nHuman: … \n\nAssistant: …`; a prompt's (`role` user) trailing empty assistant turn is its cue."""
    _, *parts = TRANSCRIPT.split(text)
    turns = tuple(
        Message(role="user" if speaker == "Human" else "assistant", content=said)
        for speaker, said in zip(parts[::2], parts[1::2], strict=True)
    )
    return turns[:-1] if role == "user" and turns[-1].role == "assistant" and not turns[-1].content else turns


def message(field: str, value: object) -> Message:
    """One message object.

    Raises:
        Refused: as `conversation`.
    """
    if not isinstance(value, dict):
        raise Refused("bad_message", f"field {field}: {kind(value)}, not an object with role and content")
    given = cast("dict[str, Any]", value)
    name = given.get("role", given.get("from"))
    if not isinstance(name, str):
        raise Refused("bad_message", f"field {field}: no role (keys: {', '.join(given)})")
    role = ROLES.get(name.strip().lower())
    if role is None:
        raise Refused("unknown_role", f"field {field}: role {name!r} is none of {', '.join(ROLES)}")
    content_key = "content" if "content" in given else "value"
    content, where = given.get(content_key), f"{field}.{content_key}"
    if role == "function_call":
        return Message(role="assistant", content="", tool_calls=_calls(where, content))
    calls = _calls(f"{field}.tool_calls", given.get("tool_calls"))
    if not calls and given.get("function_call"):
        calls = _calls(f"{field}.function_call", given["function_call"])
    if calls and role != "assistant":
        raise Refused("bad_tool_call", f"field {field}: tool calls in a {role} turn")
    turn = Message(
        role=role,
        content="" if content is None and calls else text(where, content),
        name=_optional(f"{field}.name", given.get("name")),
        tool_calls=calls,
        tool_call_id=_optional(f"{field}.tool_call_id", given.get("tool_call_id")),
        reasoning_content=_optional(f"{field}.reasoning_content", given.get("reasoning_content")),
    )
    if not speaks(turn):
        raise Refused("empty", f"field {where}: empty")
    return turn


def text(field: str, value: object) -> str:
    """A text, or the text of content blocks `{"type": "text", "text" or "value": …}` joined as they are.

    Raises:
        Refused: null, another type, a block that is not text, half of a surrogate pair.
    """
    if isinstance(value, list):
        return "".join(_block(f"{field}[{i}]", block) for i, block in enumerate(cast("list[object]", value)))
    if not isinstance(value, str):
        raise _no_text(field, value)
    if not value.isascii():
        check_unicode(field, value)
    return value


def tools(field: str, value: object) -> tuple[dict[str, Any], ...]:
    """The functions a row offers, as a list or its JSON text; a bare function gets its `{"type": "function"}` coat.

    Raises:
        Refused: not a list of objects.
    """
    offered: Any = _json(field, value, "bad_tools") if isinstance(value, str) else value
    if not offered:
        return ()
    if not isinstance(offered, list) or not all(isinstance(item, dict) for item in cast("list[object]", offered)):
        raise Refused("bad_tools", f"field {field}: {kind(offered)}, not a list of objects")
    return tuple(_coat(field, item, "bad_tools") for item in cast("list[dict[str, Any]]", offered))


def check_unicode(field: str, value: str) -> None:
    """Refuse a text that UTF-8 cannot write.

    Raises:
        Refused: half of a surrogate pair.
    """
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise Refused("bad_unicode", f"field {field}: {value[error.start]!r} at character {error.start + 1}") from None


def kind(value: Any) -> str:
    """What a detail calls a value."""
    return KINDS.get(type(value), type(value).__name__)


def _check(field: str, turn: Message) -> None:
    text(field, turn.content)
    if not speaks(turn):
        raise Refused("empty", f"field {field}: empty")


def _no_text(field: str, value: object) -> Refused:
    if value is None:
        return Refused("null", f"field {field}: null")
    return Refused("not_text", f"field {field}: {kind(value)}, not text")


def _block(field: str, block: object) -> str:
    if isinstance(block, str):
        return text(field, block)
    if not isinstance(block, dict):
        raise _no_text(field, block)
    given = cast("dict[str, Any]", block)
    if given.get("type") != "text":
        raise Refused("not_text", f"field {field}: a block of type {given.get('type')!r}, not text")
    return text(f"{field}.text", given.get("text", given.get("value")))


def _optional(field: str, value: object) -> str | None:
    return None if value is None or value == "" else text(field, value)


def _calls(field: str, value: object) -> tuple[dict[str, Any], ...]:
    calls = _json(field, value, "bad_tool_call") if isinstance(value, str) else value
    if calls is None or calls == []:
        return ()
    listed = cast("list[object]", calls) if isinstance(calls, list) else [calls]
    return tuple(_call(f"{field}[{i}]" if len(listed) > 1 else field, call) for i, call in enumerate(listed))


def _call(field: str, value: object) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise Refused("bad_tool_call", f"field {field}: {kind(value)}, not an object with name and arguments")
    call = _coat(field, cast("dict[str, Any]", value), "bad_tool_call")
    function = call.get("function")
    if not isinstance(function, dict) or not isinstance(cast("dict[str, Any]", function).get("name"), str):
        raise Refused("bad_tool_call", f"field {field}: no function name")
    return call


def _coat(field: str, value: dict[str, Any], reason: str) -> dict[str, Any]:
    """`{"name", …}` as `{"type": "function", "function": {"name", …}}`, the one form every template knows."""
    try:
        json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
    except (ValueError, TypeError) as error:
        raise Refused(reason, f"field {field}: not JSON: {error}") from None
    return {"type": "function", "function": value} if "name" in value and "function" not in value else value


def _json(field: str, value: str, reason: str) -> object:
    try:
        return json.loads(value) if value.strip() else None
    except (ValueError, RecursionError) as error:
        raise Refused(reason, f"field {field}: not JSON: {error}") from None
