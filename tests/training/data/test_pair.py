"""The rules of a pair, each on the smallest conversation that breaks it."""

from __future__ import annotations

import re

import pytest

from training.data.pair import REASONS, Message, Pair, Refused, Rejection, make_pair


def turns(text: str) -> tuple[Message, ...]:
    """`u:hi a:yo` as messages; s, u, a, t stand for the roles, `_` for a blank."""
    roles = {"s": "system", "u": "user", "a": "assistant", "t": "tool"}
    return tuple(Message(role=roles[part[0]], content=part[2:].replace("_", " ")) for part in text.split())


def judge(prompt: str, chosen: str, rejected: str) -> Pair | Rejection:
    return make_pair(turns(prompt), turns(chosen), turns(rejected), source="s", locator="f:1")


@pytest.mark.parametrize(
    ("prompt", "chosen", "rejected", "history", "ours", "theirs"),
    [
        ("u:q", "a:x", "a:y", "u:q", "a:x", "a:y"),
        ("", "u:q a:x", "u:q a:y", "u:q", "a:x", "a:y"),
        ("s:b u:q", "a:x u:r a:z", "a:y", "s:b u:q", "a:x u:r a:z", "a:y"),
        ("u:q", "a:x u:r a:1", "a:x u:r a:2", "u:q a:x u:r", "a:1", "a:2"),
        ("", "u:q a:c t:r t:r a:1", "u:q a:c t:r t:r a:2", "u:q a:c t:r t:r", "a:1", "a:2"),
        ("s: u:q", "a:x", "a:x_", "s: u:q", "a:x", "a:x_"),
    ],
)
def test_history_is_the_longest_common_prefix(
    prompt: str, chosen: str, rejected: str, history: str, ours: str, theirs: str
) -> None:
    pair = judge(prompt, chosen, rejected)
    assert isinstance(pair, Pair)
    assert (pair.prompt, pair.chosen, pair.rejected) == (turns(history), turns(ours), turns(theirs))
    assert (pair.source, pair.locator) == ("s", "f:1")


@pytest.mark.parametrize(
    ("prompt", "chosen", "rejected", "reason", "detail"),
    [
        pytest.param("u:q", "a:same", "a:same", "identical", "nothing to prefer", id="case: identical-pair"),
        pytest.param("", "u:q a:x", "u:q a:x", "identical", "nothing to prefer", id="case: prefix-pair, same"),
        pytest.param("", "u:q a:x", "u:q a:x u:m a:y", "prefix", "chosen: the beginning of rejected", id="prefix-pair"),
        pytest.param("u:q", "a:x u:m a:y", "a:x", "prefix", "rejected: the beginning of chosen", id="prefix, mirrored"),
        pytest.param("u:q a:a", "a:x", "a:y", "prompt_ends_with_assistant", "turn 2", id="case: all-rows-dropped"),
        ("", "u:q a:x u:1 a:z", "u:q a:x u:2 a:z", "prompt_ends_with_assistant", "turn 2"),
        ("", "u:1 a:x", "u:2 a:y", "no_shared_prompt", "before any user turn"),
        ("s:b", "u:1 a:x", "u:2 a:y", "no_shared_prompt", "before any user turn"),
        ("u:q", "a:_", "a:y", "empty", "field chosen: empty"),
        ("u:q", "a:x", "a:y u: a:z", "empty", "field rejected, turn 2: empty"),
        ("u:", "a:x", "a:y", "empty", "field prompt: empty"),
        ("u:q", "", "a:y", "empty", "field chosen: empty"),
        ("u:q", "a:x u:r", "a:y", "completion_end", "field chosen: ends with a user turn"),
        ("u:q", "a:x", "u:y a:z", "role_order", "field rejected, turn 2: user after user"),
        ("u:q", "a:x a:z", "a:y", "role_order", "field chosen, turn 3: assistant after assistant"),
        ("a:hi u:q", "a:x", "a:y", "role_order", "turn 1: assistant at the start"),
        ("u:q s:b u:q", "a:x", "a:y", "role_order", "turn 2: system after user"),
        ("u:q a:c t:r", "a:x t:1 u:no a:z", "a:y", "role_order", "turn 6: user after tool"),
    ],
)
def test_broken_rule_is_named(prompt: str, chosen: str, rejected: str, reason: str, detail: str) -> None:
    found = judge(prompt, chosen, rejected)
    assert isinstance(found, Rejection)
    assert found.reason == reason
    assert detail in found.detail
    assert (found.source, found.locator) == ("s", "f:1")


def test_unknown_role_is_refused() -> None:
    found = make_pair((Message(role="judge", content="x"),), turns("a:x"), turns("a:y"), source="s", locator="f:1")
    assert isinstance(found, Rejection)
    assert (found.reason, "'judge'" in found.detail) == ("unknown_role", True)


def test_a_refusal_can_always_be_written() -> None:
    """A detail may quote half of a surrogate pair, which no file can hold."""
    assert Refused("bad_unicode", "found: \ud800").detail == r"found: \ud800"


def call(arguments: object) -> Message:
    function = {"name": "w", "arguments": arguments}
    return Message(role="assistant", content="", tool_calls=({"type": "function", "function": function},))


@pytest.mark.parametrize(
    ("ours", "theirs"), [({"x": 1}, {"x": 1.0}), ({"x": 1}, {"x": True}), ({"x": 1, "y": 2}, {"y": 2, "x": 1})]
)
def test_calls_that_print_differently_differ(ours: object, theirs: object) -> None:
    assert call(ours) == call(theirs)  # what a plain comparison says
    pair = make_pair(turns("u:q"), (call(ours),), (call(theirs),), source="s", locator="f:1")
    assert isinstance(pair, Pair)
    assert (pair.chosen, pair.rejected) == ((call(ours),), (call(theirs),))


def test_message_as_a_template_takes_it() -> None:
    """case: tool-null-padding: a turn without calls has no `tool_calls` key, not a null one."""
    assert Message(role="user", content="hi").to_dict() == {"role": "user", "content": "hi"}
    full = Message(role="tool", content="3", name="w", tool_call_id="c1", reasoning_content="so")
    assert full.to_dict() == {
        "role": "tool",
        "content": "3",
        "name": "w",
        "tool_call_id": "c1",
        "reasoning_content": "so",
    }
    for message in (full, call({"x": 1})):
        assert Message.from_dict(message.to_dict()) == message


def test_reasons_are_codes_with_sentences() -> None:
    assert REASONS["prompt_ends_with_assistant"] == "prompt ends with an assistant turn"
    assert all(re.fullmatch("[a-z0-9_]+", code) and sentence for code, sentence in REASONS.items())
    assert len(set(REASONS.values())) == len(REASONS)
