"""Borders: where the prompt ends, where a turn ends, and what is refused, on text alone."""

from __future__ import annotations

from typing import Any

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from tests.training.data import tiny
from training.data.pair import Refused
from training.data.template import Conversation, Segment, Template, asks_for_time, end_of_turn
from training.errors import TokenizerError

SPECIALS = {"bos_token": "<s>", "eos_token": "</s>"}
ADDED = (*tiny.SPECIAL, *tiny.PLAIN_ADDED)


def template(text: str, date: str | None = None, **arguments: Any) -> Template:
    given = {**SPECIALS, **arguments}
    return Template(text=text, arguments=given, date=date, end=end_of_turn(text, given, ADDED))


def conversation(history: list[str], chosen: list[str], rejected: list[str], tools: Any = None) -> Conversation:
    sides = ([turn.to_dict() for turn in tiny.turns(*spoken)] for spoken in (history, chosen, rejected))
    return Conversation(**dict(zip(("history", "chosen", "rejected"), sides, strict=True)), tools=tools)


@pytest.mark.parametrize("text", [tiny.CHATML, tiny.WITH_BOS, tiny.DROPS_OLD_THOUGHTS, tiny.OPENS_THINK])
@pytest.mark.parametrize("ask", [False, True])
def test_renderings_are_those_of_transformers(text: str, ask: bool) -> None:
    talk = [turn.to_dict() for turn in tiny.turns("s: be brief", "u: 1+1?", "a: <think>easy</think>2", "u: and?")]
    (expected,), _ = render_jinja_template([talk], chat_template=text, add_generation_prompt=ask, **SPECIALS)
    assert template(text).render(talk, None, ask=ask) == expected


def test_the_sandbox_still_holds() -> None:
    for attempt in ("{{ messages.append(1) }}", "{{ ''.__class__.__mro__ }}", "{{ messages.clear() }}"):
        for _ in range(2):  # the second time the verdict is a remembered one
            with pytest.raises(Refused, match="template_refuses"):
                template(attempt).render([{"role": "user", "content": "x"}], None)


def test_a_prompt_is_the_history_with_its_generation_prompt() -> None:
    rendering = template(tiny.CHATML).split(conversation(["s: S", "u: Q"], ["a: good"], ["a: bad"]))
    head = "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\nQ<|im_end|>\n<|im_start|>assistant\n"
    assert rendering.prompt == head
    assert rendering.chosen == (Segment("good<|im_end|>", True),)
    assert rendering.rejected == (Segment("bad<|im_end|>", True),)
    assert rendering.notes == ()


def test_thoughts_dropped_from_history_are_noted() -> None:
    """Case: history-loses-think."""
    rendering = template(tiny.DROPS_OLD_THOUGHTS).split(
        conversation(["u: 1+1?", "a: <think>easy</think>2", "u: and 2+2?"], ["a: <think>hm</think>4"], ["a: 5"])
    )
    assert rendering.prompt == (
        "<|im_start|>user\n1+1?<|im_end|><|im_start|>assistant\n2<|im_end|>"
        "<|im_start|>user\nand 2+2?<|im_end|><|im_start|>assistant\n"
    )
    assert rendering.chosen == (Segment("<think>hm</think>4<|im_end|>", True),)
    assert rendering.rejected == (Segment("5<|im_end|>", True),)
    assert rendering.notes == ("history_rewritten",)


def test_a_generation_prompt_that_finished_answers_lack_is_left_out() -> None:
    """Case: template-opens-think."""
    rendering = template(tiny.OPENS_THINK).split(conversation(["u: 2+2?"], ["a: 4"], ["a: five"]))
    assert rendering.prompt == "<|user|>2+2?<|end|><|assistant|>"
    assert rendering.chosen == (Segment("4<|end|>", True),)
    assert rendering.rejected == (Segment("five<|end|>", True),)
    assert rendering.notes == ("generation_prompt_differs", "no_end_token")


def test_where_the_answers_headers_differ_the_prompt_is_the_history_alone() -> None:
    thinking = (
        "{% for m in messages %}<|im_start|>{{ m.role }}{% if '</think>' in m.content %} thinks{% endif %}{{ '\n' }}"
        "{{ m.content }}<|im_end|>{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant ready\n{% endif %}"
    )
    rendering = template(thinking).split(conversation(["u: Q"], ["a: <think></think>x"], ["a: y"]))
    assert rendering.prompt == "<|im_start|>user\nQ<|im_end|>"
    assert [segment.text for segment in (*rendering.chosen, *rendering.rejected)] == [
        "<|im_start|>assistant thinks\n<think></think>x<|im_end|>",
        "<|im_start|>assistant\ny<|im_end|>",
    ]


def test_a_template_without_any_border_is_refused_with_what_differs() -> None:
    counting = "{{ messages | length }}{% for m in messages %}{{ m.content }}{% endfor %}{% if add_generation_prompt %}>{% endif %}"  # noqa: E501
    with pytest.raises(Refused) as caught:
        template(counting).split(conversation(["u: Q"], ["a: x", "u: more", "a: y"], ["a: z"]))
    assert caught.value.reason == "template_rewrites"
    assert "'1Q>'" in caught.value.detail and "'4Qxmorey'" in caught.value.detail and "'2Qz'" in caught.value.detail


def test_only_assistant_turns_of_a_completion_are_supervised() -> None:
    """Vector 20; case: rejected-prompt-scored."""
    rendering = template(tiny.WITH_BOS).split(conversation(["u: Q"], ["a: one", "u: more", "a: two"], ["a: no"]))
    assert rendering.prompt == "<s><|user|>\nQ</s>\n<|assistant|>\n"
    assert rendering.chosen == (
        Segment("one</s>", True),
        Segment("\n<|user|>\nmore</s>\n<|assistant|>\n", False),
        Segment("two</s>", True),
    )
    assert rendering.rejected == (Segment("no</s>", True),)


def test_a_tool_turn_inside_a_completion_is_not_supervised_whatever_ends_the_call() -> None:
    """The call ends with another token than a turn does, so the end of a turn comes first after the tool's answer."""
    text = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
        "{{ '<|endoftext|>' if m.content.startswith('call') else '<|im_end|>' }}{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    rendering = template(text).split(conversation(["u: Q"], ["a: call f", "t: 3", "a: three"], ["a: no"]))
    assert rendering.chosen == (
        Segment("call f<|endoftext|>", True),
        Segment("<|im_start|>tool\n3<|im_end|><|im_start|>assistant\n", False),
        Segment("three<|im_end|>", True),
    )


def test_a_turn_rewritten_by_those_after_it_ends_at_its_end_token_or_is_refused() -> None:
    talk = conversation(["u: Q"], ["a: <think>t</think>one", "u: more", "a: two"], ["a: no"])
    rendering = template(tiny.DROPS_OLD_THOUGHTS).split(talk)
    assert rendering.chosen[0] == Segment("one<|im_end|>", True)
    without_end = tiny.DROPS_OLD_THOUGHTS.replace("<|im_end|>", "\n")
    with pytest.raises(Refused, match="before others, and no end-of-turn token"):
        template(without_end).split(talk)


@pytest.mark.parametrize(
    ("after", "kept"),
    [("</s>\n<|endoftext|>", "x</s>"), ("\n</s>\n", "x\n</s>"), ("|\n", "x|\n"), ("\n", "x\n"), ("", "x")],
)
def test_what_follows_the_end_of_a_turn_is_not_kept(after: str, kept: str) -> None:
    text = "{% for m in messages %}{{ m.content }}" + after.replace("\n", "{{ '\\n' }}") + "{% endfor %}"
    rendering = template(text).split(conversation(["u: Q"], ["a: x"], ["a: y"]))
    assert rendering.chosen == (Segment(kept, True),)
    assert ("no_end_token" in rendering.notes) == ("</s>" not in after)


def test_tools_that_a_template_does_not_show_are_noted() -> None:
    tools = [{"type": "function", "function": {"name": "w"}}]
    talk = conversation(["u: Q"], ["a: x"], ["a: y"], tools)
    assert template(tiny.CHATML).split(talk).notes == ("tools_ignored",)
    showing = "{{ tools | tojson }}" + tiny.CHATML
    assert template(showing).split(talk).notes == ()
    assert template(showing).split(talk).prompt.startswith('[{"type": "function", "function": {"name": "w"}}]')


def test_a_template_that_refuses_a_role_or_fails_is_quoted() -> None:
    refusing = "{% if messages[0].role == 'system' %}{{ raise_exception('no system turns here') }}{% endif %}"
    for text, message in ((refusing, "no system turns here"), ("{{ 1 + messages[0].content }}", "fails: unsupported")):
        with pytest.raises(Refused, match=message):
            template(text).split(conversation(["s: S", "u: Q"], ["a: x"], ["a: y"]))


def test_the_clock_is_pinned_or_refused_by_name() -> None:
    """Case: date-in-template."""
    talk = [{"role": "user", "content": "hi"}]
    assert template(tiny.ASKS_FOR_DATE, date="2026-03-01").render(talk, None).startswith("Today is 2026-03-01.")
    assert template("{{ now().year }}", date="2026-03-01").render(talk, None) == "2026"
    for text, call in ((tiny.ASKS_FOR_DATE, r"strftime_now\(\)"), ("{{ now().year }}", r"now\(\)")):
        assert asks_for_time(text)
        with pytest.raises(TokenizerError, match=call):
            template(text).render(talk, None)
    assert not asks_for_time(tiny.CHATML)
    unless_told = "{% if day is not defined %}{% set day = strftime_now('%d') %}{% endif %}{{ day }}"
    assert template(unless_told, day="1st").render(talk, None) == "1st"


def test_the_end_of_a_turn_is_the_first_added_token_after_an_answer() -> None:
    assert end_of_turn(tiny.CHATML, SPECIALS, ADDED) == "<|im_end|>"
    assert end_of_turn(tiny.WITH_BOS, SPECIALS, ADDED) == "</s>"
    assert end_of_turn(tiny.OPENS_THINK, SPECIALS, ADDED) is None
    assert end_of_turn("{{ raise_exception('never') }}", SPECIALS, ADDED) is None
    assert end_of_turn("</s>", SPECIALS, ADDED) is None, "this template shows no answer that a turn could end after"
