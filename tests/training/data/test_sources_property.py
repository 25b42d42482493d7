"""No row is lost: whatever stands in a file, each row comes out as a pair or as a rejection, and nothing is raised."""

from __future__ import annotations

import json
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.training.data.rows import SHAPES, spec
from training.data.chunk import RawChunk, parse
from training.data.formats import FORMATS
from training.data.pair import REASONS, Pair, Rejection
from training.data.sources import chunks, open_source

TEXT = st.sampled_from(["", " ", "q", "x", "\n\nHuman: q\n\nAssistant: x", "\n\nHuman:", "[", "\u2028", "\ud800"])
ROLE = st.sampled_from(["user", "assistant", "system", "tool", "human", "gpt", "function_call", "observation", "judge"])
ANY = st.recursive(
    st.none() | st.booleans() | st.integers(-1, 3) | st.floats() | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from("abc"), inner, max_size=2),
    max_leaves=4,
)
MESSAGE = st.fixed_dictionaries(
    {}, optional={"role": ROLE, "content": TEXT | ANY, "from": ROLE, "value": TEXT, "tool_calls": ANY, "name": ANY}
)
SCORED = st.fixed_dictionaries({}, optional={"response": TEXT | ANY, "score": ANY, "rank": ANY})
ODD = TEXT | ANY | MESSAGE | st.lists(MESSAGE, max_size=4) | st.lists(SCORED, max_size=3)
COLUMNS = sorted({name for form in FORMATS.values() for name in form.known})


def row_of(form: str) -> st.SearchStrategy[Any]:
    """Rows of the format in which up to three columns hold, or lack, anything; and what is no row at all."""
    good = st.sampled_from([row for name, row, _ in SHAPES if name == form])
    found = st.sampled_from(sorted({column for name, row, _ in SHAPES if name == form for column in row}))
    changes = st.dictionaries(found | st.sampled_from(COLUMNS), ODD, max_size=3)
    lacks = st.sets(found, max_size=1)
    row = st.builds(
        lambda row, new, out: {k: v for k, v in {**row, **new}.items() if k not in out}, good, changes, lacks
    )
    return row | ANY


@pytest.mark.parametrize("form", FORMATS)
def test_any_row_is_a_pair_or_a_rejection(form: str) -> None:
    seen = Counter[str]()

    @settings(deadline=None, max_examples=150, database=None, derandomize=True)
    @given(st.lists(row_of(form), min_size=1, max_size=4))
    def judged(rows: list[Any]) -> None:
        where = tuple(f"f:{i}" for i in range(len(rows)))
        texts = tuple(json.dumps(row).encode() for row in rows)
        chunk = RawChunk(source="s", format=form, mapping={}, kind="lines", locators=where, rows=texts)
        found = parse(chunk)
        assert list(dict.fromkeys(o.locator.partition(" ")[0] for o in found)) == list(where)
        seen.update(map(check, found))

    judged()
    assert seen["pair"] > 5
    assert len(seen) > 5


def check(outcome: Pair | Rejection) -> str:
    """`pair`, or the reason of a rejection, once what must be true of every one of them is."""
    if isinstance(outcome, Rejection):
        assert outcome.reason in REASONS
        assert outcome.detail.encode()
        assert outcome.row is not None
        return outcome.reason
    assert outcome.prompt[-1].role in ("user", "tool")
    for side in (outcome.chosen, outcome.rejected):
        assert (side[0].role, side[-1].role) == ("assistant", "assistant")
    assert outcome.chosen[0] != outcome.rejected[0] or outcome.chosen[0].tool_calls
    for message in (*outcome.prompt, *outcome.chosen, *outcome.rejected):
        assert message.content.encode().strip() or message.tool_calls or message.role in ("system", "tool")
    return "pair"


GOOD = {"prompt": "q", "chosen": "x", "rejected": "y"}
LINES = {
    "pair": json.dumps(GOOD),
    "null": json.dumps({**GOOD, "rejected": None}),
    "broken_json": '{"prompt": "q"',
    "not_an_object": "7",
    "identical": json.dumps({**GOOD, "rejected": "x"}),
    "missing_field": json.dumps({"prompt": "q"}),
}


@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.sampled_from([*LINES, "blank"]), max_size=12),
    st.lists(st.sampled_from(sorted(LINES)), max_size=6),
    st.integers(1, 5),
)
def test_no_line_is_lost(first: list[str], second: list[str], size: int) -> None:
    """Input rows by kind = outcomes by kind, for two files and any chunk size; blank lines are no rows."""
    with tempfile.TemporaryDirectory() as folder:
        for name, kinds in (("a.jsonl", ["pair", *first]), ("b.jsonl", second)):
            lines = [LINES.get(kind, " ") for kind in kinds]
            (Path(folder) / name).write_text("".join(line + "\n" for line in lines), encoding="utf-8")
        source = open_source(spec(folder))
        taken = list(chunks(source, size))
    rows = [kind for kind in ["pair", *first, *second] if kind != "blank"]
    assert sum(map(len, taken)) == len(rows)
    assert max(map(len, taken)) <= size
    found = [outcome for chunk in taken for outcome in parse(chunk)]
    assert ["pair" if isinstance(o, Pair) else o.reason for o in found] == rows
    expected = [f"a.jsonl:{i}" for i, kind in enumerate(["pair", *first], start=1) if kind != "blank"]
    assert [o.locator for o in found] == expected + [f"b.jsonl:{i + 1}" for i in range(len(second))]


@settings(deadline=None, max_examples=20)
@given(st.lists(st.sampled_from(["pair", "null", "identical"]), min_size=1, max_size=9), st.integers(1, 4))
def test_no_row_of_a_table_is_lost(kinds: list[str], size: int) -> None:
    table = pa.Table.from_pylist([json.loads(LINES[kind]) for kind in ["pair", *kinds]])
    with tempfile.TemporaryDirectory() as folder:
        pq.write_table(table, Path(folder) / "a.parquet", row_group_size=3)
        taken = list(chunks(open_source(spec(folder)), size))
    found = [outcome for chunk in taken for outcome in parse(chunk)]
    assert sum(map(len, taken)) == len(found) == len(kinds) + 1
    assert Counter("pair" if isinstance(o, Pair) else o.reason for o in found) == Counter(["pair", *kinds])
    assert [o.locator for o in found] == [f"a.parquet#row {i + 1}" for i in range(len(found))]


@pytest.mark.parametrize(("chosen", "rejected"), [(1, 1), (2, 3), (3, 1)])
def test_lists_give_their_product(chosen: int, rejected: int) -> None:
    row = {"prompt": "q", "chosen": [f"x{i}" for i in range(chosen)], "rejected": [f"y{i}" for i in range(rejected)]}
    chunk = RawChunk(
        source="s",
        format="explicit",
        mapping={},
        kind="lines",
        locators=("f:1",),
        rows=(json.dumps(row).encode(),),
    )
    found = parse(chunk)
    texts = {(o.chosen[0].content, o.rejected[0].content) for o in found if isinstance(o, Pair)}
    assert len(found) == len(texts) == chosen * rejected
    assert len({o.locator for o in found}) == len(found)
