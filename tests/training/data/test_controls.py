"""Texts that look like control tokens: found, kept apart from the template's, and written out."""

from __future__ import annotations

from training.data.controls import MARKS, Control, Run, make_controls, strings

CONTROLS = make_controls([Control("<|end|>", 1), Control("<|end|>>", 2), Control("<s>", 3, rstrip=True), Control("[M]", 4, lstrip=True)])  # noqa: E501  # fmt: skip


def test_occurrences_are_found_and_near_misses_are_not() -> None:
    assert CONTROLS.occur(["plain", "x<s>y"]) and CONTROLS.occur(["[M]"])
    assert not CONTROLS.occur(["<|en d|>", "< s>", "[m]", ""])
    assert not make_controls([]).occur(["<s>"])


def test_a_mark_is_no_character_of_the_conversation() -> None:
    taken = chr(MARKS[0])
    marks = CONTROLS.marks([f"a<s>{taken}", "<|end|>>b<s>"])
    assert list(marks) == ["<s>", "<|end|>>"], "the longest token at a place, each once"
    assert taken not in marks.values() and len(set(marks.values())) == 2


def test_quoting_reaches_every_string_and_nothing_else() -> None:
    value = {"a<s>": ["<s>", 1, None, True, {"b": "x<|end|>"}]}
    marks = CONTROLS.marks(list(strings(value)))
    quoted = CONTROLS.quote(value, marks)
    s, end = marks["<s>"], marks["<|end|>"]
    assert quoted == {f"a{s}": [s, 1, None, True, {"b": f"x{end}"}]}
    assert list(strings(value)) == ["a<s>", "<s>", "b", "x<|end|>"]


def test_runs_write_out_the_marked_stretch_between_the_templates_own_tokens() -> None:
    marks = CONTROLS.marks(["say <|end|> now"])
    rendered = f"<|end|>one<|end|>say {marks['<|end|>']} now<|end|>two"
    assert CONTROLS.runs(rendered, marks, start=True) == [
        Run("<|end|>one<|end|>", start=True),
        Run("say <|end|> now", plain=True),
        Run("<|end|>two"),
    ]
    assert CONTROLS.runs("no mark <s>", {}, start=True) == [Run("no mark <s>", start=True)]
    assert CONTROLS.runs("", {}, start=False) == []


def test_blanks_that_a_token_takes_along_stay_with_it() -> None:
    marks = CONTROLS.marks(["<|end|>"])
    mark = marks["<|end|>"]
    assert CONTROLS.runs(f"<s>\n {mark} [M]x", marks, start=False) == [
        Run("<s>\n "),
        Run("<|end|>", plain=True),
        Run(" [M]x"),
    ]


def test_parting_breaks_each_token_after_its_first_character() -> None:
    assert CONTROLS.parted("a<s>b<|end|>") == ["a<", "s>b<", "|end|>"]
    assert CONTROLS.parted("plain") == ["plain"]
