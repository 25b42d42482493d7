"""Every shape of row, on a row of each: what becomes of it, and how it is told from the others."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.training.data.rows import HUMAN, SHAPES, U, X, Y, read, spec, told, write
from training.data.formats import FORMATS
from training.data.formats.drafts import BESIDE
from training.data.formats.messages import ROLES
from training.data.pair import REASONS, Pair, Rejection
from training.data.sources import open_source
from training.errors import SourceError


def outcomes(folder: Path, *rows: Any, **options: Any) -> list[Pair | Rejection]:
    return read(write(folder / "pairs.jsonl", rows), **options)


def one(folder: Path, row: Any, **options: Any) -> Pair | Rejection:
    (outcome,) = outcomes(folder, row, **options)
    return outcome


@pytest.mark.parametrize(("name", "row", "expected"), SHAPES)
def test_row_is_read(name: str, row: dict[str, Any], expected: str, tmp_path: Path) -> None:
    path = write(tmp_path / "pairs.jsonl", [row])
    assert open_source(spec(path)).format == name
    assert [told(outcome) for outcome in read(path)] == [expected]
    assert [told(outcome) for outcome in read(path, format=name)] == [expected]


def test_every_format_is_read_above() -> None:
    assert {name for name, _, _ in SHAPES} == set(FORMATS)


def test_lists_of_answers_give_every_combination(tmp_path: Path) -> None:
    """2 chosen and 3 rejected answers are 6 outcomes; the null and the equal one cost their own combinations alone."""
    row = {"prompt": "q", "chosen": ["x", "y"], "rejected": ["y", None, [Y, {**U, "content": "r"}, X]]}
    assert [told(outcome) for outcome in outcomes(tmp_path, row)] == [
        "u:q | a:x | a:y",
        "null @ pairs.jsonl:1 (chosen 1, rejected 2)",
        "u:q | a:x | a:y u:r a:x",
        "identical @ pairs.jsonl:1 (chosen 2, rejected 1)",
        "null @ pairs.jsonl:1 (chosen 2, rejected 2)",
        "prefix @ pairs.jsonl:1 (chosen 2, rejected 3)",
    ]
    assert told(one(tmp_path, {"prompt": "q", "chosen": [], "rejected": ["y"]})) == "empty @ pairs.jsonl:1"


REFUSED = [
    ({"prompt": "q", "chosen": "x", "rejected": None}, "null", "field rejected: null"),
    ({"prompt": "q", "chosen": "", "rejected": "y"}, "empty", "field chosen: empty"),
    ({"prompt": "q", "chosen": "x", "rejected": " \n"}, "empty", "field rejected: empty"),
    ({"prompt": "q", "chosen": "x", "rejected": 7}, "not_text", "field rejected: a number, not text"),
    ({"prompt": "q", "chosen": "x"}, "missing_field", "column rejected: missing (found: prompt, chosen)"),
    ({"prompt": "q", "chosen": [{"role": "assistant", "content": None}], "rejected": "y"}, "null", "chosen[0].content"),
    ({"prompt": "q", "chosen": [{"content": "x"}], "rejected": "y"}, "bad_message", "chosen[0]: no role"),
    ({"prompt": ["q"], "chosen": "x", "rejected": "y"}, "bad_message", "field prompt[0]: text, not an object"),
    ({"prompt": [{"role": "judge", "content": "q"}], "chosen": "x", "rejected": "y"}, "unknown_role", "'judge'"),
    ({"prompt": "q", "chosen": "\ud800", "rejected": "y"}, "bad_unicode", "field chosen: '\\ud800' at character 1"),
    ({"prompt": "q", "chosen": "x", "rejected": "y", "images": ["a.png"]}, "not_text", "field images"),
    (
        {"prompt": [{"role": "user", "content": [{"type": "image_url"}]}], "chosen": "x", "rejected": "y"},
        "not_text",
        "field prompt[0].content[0]: a block of type 'image_url'",
    ),
    ({"prompt": "q", "chosen": "x", "rejected": "y", "tools": "[{"}, "bad_tools", "field tools: not JSON"),
    ({"prompt": "q", "chosen": "x", "rejected": "y", "tools": [1]}, "bad_tools", "not a list of objects"),
    (
        {"prompt": "q", "chosen": {"role": "assistant", "tool_calls": [{"arguments": {}}]}, "rejected": "y"},
        "bad_tool_call",
        "field chosen.tool_calls: no function name",
    ),
    (
        {"prompt": "q", "chosen": {"from": "function_call", "value": "Action: w"}, "rejected": "y"},
        "bad_tool_call",
        "field chosen.value: not JSON",
    ),
]


@pytest.mark.parametrize(("row", "reason", "detail"), REFUSED)
def test_refused_row_names_field_and_rule(row: dict[str, Any], reason: str, detail: str, tmp_path: Path) -> None:
    path = tmp_path / "pairs.jsonl"
    path.write_text(json.dumps(row) + "\n", encoding="utf-8")
    (found,) = read(path, format="explicit") if "rejected" in row else read(path, _good(tmp_path))[1:]
    assert isinstance(found, Rejection)
    assert (found.reason, found.locator) == (reason, "pairs.jsonl:1")
    assert detail in found.detail
    assert found.row == json.dumps(row)


def _good(folder: Path) -> Path:
    return write(folder / "good.jsonl", [{"prompt": "q", "chosen": "x", "rejected": "y"}])


def test_prompt_column_beside_whole_conversations(tmp_path: Path) -> None:
    """case: prompt-twice."""
    row = {"prompt": "q", "chosen": [U, X], "rejected": [U, Y]}
    other = {**row, "prompt": "r"}
    apart = {"prompt": [U], "chosen": [X], "rejected": [Y]}
    found = outcomes(tmp_path, row, other, apart)
    assert [told(outcome) for outcome in found] == [
        "u:q | a:x | a:y",
        "prompt_differs @ pairs.jsonl:2",
        "u:q | a:x | a:y",
    ]
    assert isinstance(found[1], Rejection)
    assert found[1].detail == (
        "prompt column differs from the first turn of field chosen: prompt has 'r', chosen has 'q'"
    )


SYSTEM = {"role": "system", "content": "b"}


@pytest.mark.parametrize(
    ("system", "chosen", "rejected", "expected"),
    [
        ("b", [U, X], [U, Y], "s:b u:q | a:x | a:y"),
        (None, [U, X], [U, Y], "u:q | a:x | a:y"),
        ("", [U, X], [U, Y], "u:q | a:x | a:y"),
        ("b", [SYSTEM, U, X], [SYSTEM, U, Y], "s:b u:q | a:x | a:y"),
        ("b", [SYSTEM, U, X], [U, Y], "s:b u:q | a:x | a:y"),
        ("other", [SYSTEM, U, X], [SYSTEM, U, Y], "system_differs @ pairs.jsonl:1"),
        ("other", [U, X], [SYSTEM, U, Y], "system_differs @ pairs.jsonl:1"),
        (None, [SYSTEM, U, X], [U, Y], "no_shared_prompt @ pairs.jsonl:1"),
    ],
)
def test_system_column_goes_to_both_sides(
    system: str | None, chosen: list[Any], rejected: list[Any], expected: str, tmp_path: Path
) -> None:
    """case: system-one-side."""
    assert told(one(tmp_path, {"system": system, "chosen": chosen, "rejected": rejected})) == expected


def test_no_prompt_is_guessed_inside_a_text(tmp_path: Path) -> None:
    """case: prefix-pair: texts without a prompt are refused, and no shared turn is left in an answer."""
    texts = {"chosen": "Rain falls in 10", "rejected": "Rain falls in 10 towns"}
    rows = [texts, {"chosen": [U, X], "rejected": [U, X]}, {"chosen": [U, X], "rejected": [U, X, U, Y]}]
    assert [told(outcome) for outcome in outcomes(tmp_path, *rows)] == [
        "no_shared_prompt @ pairs.jsonl:1",
        "identical @ pairs.jsonl:2",
        "prefix @ pairs.jsonl:3",
    ]


@pytest.mark.parametrize(
    ("columns", "label", "winner"),
    [
        ("output_1 output_2", 1, 0),
        ("output_1 output_2", 2, 1),
        ("output_1 output_2", 1.0, 0),
        ("output_1 output_2", "2", 1),
        ("output_1 output_2", "output_2", 1),
        ("output_1 output_2", "Output (a)", 0),
        ("output_1 output_2", 0, "tie"),
        ("output_1 output_2", True, "bad_label"),
        ("output_1 output_2", None, "bad_label"),
        ("output_1 output_2", 3, "bad_label"),
        ("output_0 output_1", 0, 0),
        ("output_0 output_1", 1, 1),
        ("output_0 output_1", 2, "bad_label"),
        ("response_A response_B", "A>B", 0),
        ("response_A response_B", "B>>A", 0 + 1),
        ("response_A response_B", "A<B", 1),
        ("response_A response_B", "A=B", "tie"),
        ("response_A response_B", "A>A", "bad_label"),
        ("response_A response_B", "tie (bothbad)", "tie"),
        ("response_A response_B", "model_a", 0),
        ("response_A response_B", "B", 1),
        ("response_A response_B", "best", "bad_label"),
        ("output_1 output_2", [1, 1, 2], 0),
        ("output_1 output_2", [1, 2, 0], "tie"),
        ("output_1 output_2", [0, 0, 1], "tie"),
        ("output_1 output_2", [2, 2, 1, 0], "tie"),
        ("output_1 output_2", [2, 2, 2, 0, 1], 1),
        ("output_1 output_2", [1, "?"], "bad_label"),
    ],
)
def test_labels_and_votes(columns: str, label: object, winner: int | str, tmp_path: Path) -> None:
    first, second = columns.split()
    outcome = one(tmp_path, {"prompt": "q", first: "1st", second: "2nd", "label": label})
    told_as = {0: "u:q | a:1st | a:2nd", 1: "u:q | a:2nd | a:1st"}
    assert told(outcome) == (told_as[winner] if isinstance(winner, int) else f"{winner} @ pairs.jsonl:1")


@pytest.mark.parametrize(
    ("answers", "reason"),
    [
        ({"completions": ["x", "y"], "scores": [3, 3]}, "tie"),
        ({"completions": ["x", "y"], "scores": [3]}, "bad_score"),
        ({"completions": ["x", "y"], "scores": [3, "N/A"]}, "bad_score"),
        ({"completions": ["x", "y"], "scores": [3, True]}, "bad_score"),
        ({"completions": ["x", "y"]}, "bad_score"),
        ({"completions": [{"text": "x", "score": 1}, {"text": "y", "score": None}]}, "bad_score"),
        ({"completions": [{"said": "x", "score": 1}, {"said": "y", "score": 2}]}, "missing_field"),
        ({"completions": [{"text": "x", "score": 1}]}, "too_few"),
        ({"completions": "x"}, "too_few"),
        ({"completions": None}, "null"),
        ({"completions": "[", "scores": "[1"}, "too_few"),
    ],
)
def test_lists_that_cannot_be_ranked(answers: dict[str, Any], reason: str, tmp_path: Path) -> None:
    assert told(one(tmp_path, {"prompt": "q", **answers})) == f"{reason} @ pairs.jsonl:1"


def test_not_a_number_is_no_score(tmp_path: Path) -> None:
    row = '{"prompt": "q", "completions": ["x", "y"], "scores": [NaN, 1]}'
    assert told(one(tmp_path, row)) == "bad_score @ pairs.jsonl:1"


def test_sharegpt_calls_and_observations(tmp_path: Path) -> None:
    talk = [
        HUMAN,
        {"from": "function_call", "value": '{"name": "w", "arguments": {"city": "Oslo"}}'},
        {"from": "observation", "value": "3 C"},
    ]
    bare = {"name": "w", "parameters": {"type": "object"}}
    pair = one(tmp_path, {"conversations": talk, "tools": json.dumps([bare]), "chosen": "3", "rejected": "9"})
    assert isinstance(pair, Pair)
    assert [m.role for m in pair.prompt] == ["user", "assistant", "tool"]
    assert pair.prompt[1].tool_calls == (
        {"type": "function", "function": {"name": "w", "arguments": {"city": "Oslo"}}},
    )
    assert pair.tools == ({"type": "function", "function": bare},)


def test_message_fields_are_kept(tmp_path: Path) -> None:
    """Every spelling of a call comes out in one form; its arguments are not touched, be they text or an object."""
    flat = {"name": "w", "arguments": {"b": 1, "a": None}}
    coated = {"id": "c1", "type": "function", "function": {"name": "w", "arguments": '{"b": 1}'}}
    prompt = [
        {"role": "developer", "content": "b"},
        U,
        {"role": "assistant", "content": None, "tool_calls": [flat, coated]},
        {"role": "tool", "content": "", "name": "w", "tool_call_id": "c1"},
        {"role": "function", "content": "3 C"},
        {"role": "assistant", "content": "a", "reasoning_content": "hm", "tool_calls": None, "name": ""},
        {"role": "user", "content": "again", "weight": 1},
        {"role": "assistant", "content": None, "function_call": flat},
        {"role": "tool", "content": "4 C"},
    ]
    pair = one(tmp_path, {"prompt": prompt, "chosen": [X], "rejected": [Y]})
    assert isinstance(pair, Pair)
    function = {"type": "function", "function": flat}
    assert [m.to_dict() for m in pair.prompt] == [
        {"role": "system", "content": "b"},
        U,
        {"role": "assistant", "content": "", "tool_calls": [function, coated]},
        {"role": "tool", "content": "", "name": "w", "tool_call_id": "c1"},
        {"role": "tool", "content": "3 C"},
        {"role": "assistant", "content": "a", "reasoning_content": "hm"},
        {"role": "user", "content": "again"},
        {"role": "assistant", "content": "", "tool_calls": [function]},
        {"role": "tool", "content": "4 C"},
    ]
    assert list(pair.prompt[2].tool_calls[0]["function"]["arguments"]) == ["b", "a"]


def test_renamed_columns(tmp_path: Path) -> None:
    """case: extra-columns."""
    path = write(tmp_path / "pairs.jsonl", [{"ask": "2+2?", "good": "4", "bad": "5", "score": 0.9}])
    with pytest.raises(SourceError) as refusal:
        open_source(spec(path))
    message = str(refusal.value)
    assert "[ask, good, bad, score]" in message
    assert "explicit (prompt, chosen, rejected)" in message
    assert 'map = { prompt = "…"' in message
    mapping = {"prompt": "ask", "chosen": "good", "rejected": "bad"}
    source = open_source(spec(path, mapping=mapping))
    assert (source.format, source.ignored_columns) == ("explicit", ("score",))
    assert [told(outcome) for outcome in read(path, mapping=mapping)] == ["u:2+2? | a:4 | a:5"]


@pytest.mark.parametrize(
    ("mapping", "message"),
    [
        ({"prompt": "asked"}, r"names column asked, but found are \[ask, good, bad\]"),
        ({"promt": "ask"}, "promt is no column a format wants; wanted names are .*prompt"),
    ],
)
def test_mapping_that_cannot_be(mapping: dict[str, str], message: str, tmp_path: Path) -> None:
    path = write(tmp_path / "pairs.jsonl", [{"ask": "q", "good": "x", "bad": "y"}])
    with pytest.raises(SourceError, match=message):
        open_source(spec(path, mapping=mapping))


def test_mapping_may_swap_columns(tmp_path: Path) -> None:
    row = {"prompt": "q", "chosen": "x", "rejected": "y"}
    swapped = one(tmp_path, row, mapping={"chosen": "rejected", "rejected": "chosen"})
    assert told(swapped) == "u:q | a:y | a:x"


@pytest.mark.parametrize(
    "row",
    [
        {"messages": [U, X], "label": True},
        {"prompt": "q", "completion": "x", "label": False},
        {"instruction": "q", "output": "x", "kto_tag": True},
    ],
)
def test_unpaired_rows_are_refused(row: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(SourceError, match="unpaired rows, one answer with a label each, as for KTO; a pair needs two"):
        open_source(spec(write(tmp_path / "kto.jsonl", [row])))


def test_two_formats_that_fit_equally(tmp_path: Path) -> None:
    row = {"prompt": "q", "instruction": "q", "chosen": "x", "rejected": "y"}
    with pytest.raises(SourceError, match="fit explicit and alpaca equally well; say which with format = 'explicit'"):
        open_source(spec(write(tmp_path / "pairs.jsonl", [row])))
    assert told(one(tmp_path, row, format="alpaca")) == "u:q | a:x | a:y"


def test_content_tells_formats_of_equal_columns_apart(tmp_path: Path) -> None:
    row = {"prompt": "q", "conversations": None, "chosen": "x", "rejected": "y"}
    path = write(tmp_path / "pairs.jsonl", [row])
    source = open_source(spec(path))
    assert (source.format, source.ignored_columns) == ("explicit", ("conversations",))


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ("dpo", "there is no format 'dpo'; known: auto, explicit, implicit"),
        ("alpaca", r"columns \[prompt, chosen, rejected\] fit no format; .* alpaca \(instruction, chosen, rejected\)"),
    ],
)
def test_format_asked_for_that_cannot_be(asked: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(SourceError, match=message):
        open_source(spec(_good(tmp_path), format=asked))


def test_no_good_row_is_still_an_account(tmp_path: Path) -> None:
    """case: all-rows-dropped: the reason's sentence and the first locator are what a summary needs."""
    row = {"prompt": [U, X], "chosen": [X], "rejected": [Y]}
    good = {"prompt": [U], "chosen": [X], "rejected": [Y]}
    assert [told(outcome) for outcome in outcomes(tmp_path, row, row, row, good)] == [
        "prompt_ends_with_assistant @ pairs.jsonl:1",
        "prompt_ends_with_assistant @ pairs.jsonl:2",
        "prompt_ends_with_assistant @ pairs.jsonl:3",
        "u:q | a:x | a:y",
    ]


def test_every_format_reason_and_role_is_documented() -> None:
    text = (Path(__file__).parents[3] / "docs" / "formats.md").read_text(encoding="utf-8")
    assert len(REASONS) > 30
    assert [code for code in REASONS if f"| `{code}` |" not in text] == []
    columns = {name for form in FORMATS.values() for group in form.needs[-2:] for name in group[0]}
    endings = {"output_1", "output_2"}
    assert [name for name in {*FORMATS, *columns, *BESIDE} - endings if f"`{name}`" not in text] == []
    assert [name for name in ROLES if name not in text] == []
