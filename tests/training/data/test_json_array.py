"""Arrays in blocks of any size are the arrays that the standard decoder reads whole."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from training.data.json_array import Broken, EndsInside, elements

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=8,
)


def blocks(text: bytes, size: int) -> list[bytes]:
    return [text[start : start + size] for start in range(0, len(text), size)]


@settings(deadline=None, max_examples=60)
@given(st.lists(VALUES, max_size=6), st.integers(1, 9), st.sampled_from([None, 1]), st.booleans())
def test_elements_are_those_of_the_whole(values: list[object], size: int, indent: int | None, ascii_only: bool) -> None:
    text = json.dumps(values, indent=indent, ensure_ascii=ascii_only).encode("utf-8", "surrogatepass")
    try:
        text.decode()
    except UnicodeDecodeError:
        return
    assert [json.loads(element) for element in elements(blocks(text, size))] == values


@pytest.mark.parametrize("size", [1, 3, 1000])
def test_every_cut_is_seen(size: int) -> None:
    values = [{"a": 'x\u20ac\\"', "b": [1.5e-7, True, None]}, 12, "\U0001f600", {}]
    for ascii_only in (True, False):
        text = json.dumps(values, ensure_ascii=ascii_only).encode()
        for end in range(1, len(text)):
            found: list[object] = []
            with pytest.raises(EndsInside) as cut:
                for element in elements(blocks(text[:end], size)):
                    found.append(json.loads(element))  # noqa: PERF401 - what came before the cut must be seen
            assert found == values[: len(found)]
            assert cut.value.number == len(found) + 1


@pytest.mark.parametrize(
    ("text", "number", "why"),
    [
        ('[{"a": 1}, {"a": x}, {"a": 2}, {"a": 3}]', 2, "Expecting value"),
        ('[{"a": 1} {"a": 2}]', 2, "where , or ] must stand"),
        ("[1, 2] 3", 3, "after the end"),
        ('[1, "tab\tin text", 3, 4, 5, 6, 7, 8]', 2, "Invalid control character"),
        ("[" * 100_000, 1, "too deep"),
        ("{}", 1, "no array"),
    ],
)
def test_broken_arrays_name_the_element(text: str, number: int, why: str) -> None:
    with pytest.raises(Broken) as broken:
        list(elements([text.encode()]))
    assert broken.value.number == number
    assert why in broken.value.why


def test_blanks_and_a_byte_order_mark() -> None:
    assert list(elements([b"\xef\xbb\xbf \n[ \r\n1\t,\n{} ] \n"])) == [b"1", b"{}"]
    assert list(elements([b" [ ] "])) == []


def test_bytes_that_are_not_utf8_stay() -> None:
    assert list(elements([b'["a\xffb"]'])) == [b'"a\xffb"']
