"""Files of every kind, cut and whole, and what a source's identity is."""

from __future__ import annotations

import csv
import gzip
import io
import json
import pickle
import tracemalloc
from pathlib import Path
from typing import Any

import fsspec
import pyarrow as pa
import pyarrow.feather as feather
import pyarrow.parquet as pq
import pytest

from tests.training.data.rows import read, spec, told, write
from training.data import files, sources
from training.data.pair import Pair, Rejection
from training.data.sources import chunks, open_source, parse
from training.errors import SourceError

ROW = {"prompt": "q", "chosen": "x", "rejected": "y"}


def rows(count: int) -> list[dict[str, Any]]:
    return [{"prompt": f"q{i}", "chosen": "x", "rejected": "y"} for i in range(count)]


def zstd(content: bytes) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.CompressedOutputStream(sink, "zstd") as stream:
        stream.write(content)
    return sink.getvalue().to_pybytes()


def test_lines_are_split_on_the_line_feed_alone(tmp_path: Path) -> None:
    """case: line-separator."""
    texts = ["a\u2028b", "e\u0085f", "g\u000bh\u000ci\u001cj", "k\rl"]
    lines = [json.dumps({**ROW, "prompt": text}, ensure_ascii=False) for text in texts]
    assert "\u2028" in lines[0]
    path = tmp_path / "pairs.jsonl"
    path.write_bytes("\r\n".join(lines).encode())
    found = read(path)
    assert [(o.prompt[0].content, o.locator) for o in found if isinstance(o, Pair)] == [
        (text, f"pairs.jsonl:{number}") for number, text in enumerate(texts, start=1)
    ]


@pytest.mark.parametrize("count", [1, 2])
def test_missing_last_line_feed(count: int, tmp_path: Path) -> None:
    """case: single-line-no-newline."""
    path = tmp_path / "pairs.jsonl"
    path.write_text("\n".join(json.dumps(row) for row in rows(count)), encoding="utf-8")
    assert [told(outcome) for outcome in read(path)] == [f"u:q{i} | a:x | a:y" for i in range(count)]


def test_blank_lines_are_no_rows_but_count_as_lines(tmp_path: Path) -> None:
    path = write(tmp_path / "pairs.jsonl", ["", json.dumps(ROW), "  ", json.dumps({**ROW, "chosen": None}), ""])
    assert [told(outcome) for outcome in read(path)] == ["u:q | a:x | a:y", "null @ pairs.jsonl:4"]


def test_file_that_ends_inside_a_record(tmp_path: Path) -> None:
    """case: cut-last-line: every cut of the second record is one truncated row, never a row with nulls."""
    whole = json.dumps(ROW) + "\n" + json.dumps({**ROW, "rejected": "n\u00f6"}, ensure_ascii=False)
    first = len(json.dumps(ROW)) + 1
    path = tmp_path / "pairs.jsonl"
    for end in range(first + 1, len(whole.encode())):
        path.write_bytes(whole.encode()[:end])
        good, cut = read(path)
        assert isinstance(good, Pair)
        assert isinstance(cut, Rejection)
        assert (cut.reason, cut.locator) == ("truncated", "pairs.jsonl:2")
        assert "ends inside a record" in cut.detail


@pytest.mark.parametrize("name", ["pairs.jsonl.gz", "pairs.json.gz", "pairs.csv.gz", "pairs.jsonl.zst"])
def test_compressed_file_cut_short(name: str, tmp_path: Path) -> None:
    """case: cut-last-line, compressed."""
    contents = {
        "jsonl": "\n".join(json.dumps(row) for row in rows(3)),
        "json": json.dumps(rows(3)),
        "csv": "prompt,chosen,rejected\n" + "".join(f"q{i},x,y\n" for i in range(3)),
    }
    raw = contents[name.split(".")[1]].encode()
    path = tmp_path / name
    good = tmp_path / "a.jsonl"
    write(good, [ROW])
    packed = gzip.compress(raw, mtime=0) if name.endswith("gz") else zstd(raw)
    path.write_bytes(packed[:-9])
    *before, cut = read(good, path)
    assert isinstance(cut, Rejection)
    assert cut.reason == "truncated"
    assert cut.locator.startswith(name)
    assert "truncated" in cut.detail
    assert all(isinstance(outcome, Pair) for outcome in before)
    path.write_bytes(packed)
    assert len(read(good, path)) == 4
    assert open_source(spec(good, path)).fingerprint != cut_fingerprint(good, path, packed[:-9])


def cut_fingerprint(good: Path, path: Path, content: bytes) -> str:
    path.write_bytes(content)
    return open_source(spec(good, path)).fingerprint


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b"{not json", "broken_json"),
        (b"[1, 2]", "not_an_object"),
        (b"null", "not_an_object"),
        (b'{"prompt": "\xff"}', "not_utf8"),
        (b"\xff\xfe{\x00", "not_utf8"),
        (b"[" * 100_000, "broken_json"),
        (b'{"prompt": ' + b"1" * 5000 + b"}", "broken_json"),
    ],
)
def test_broken_line_costs_itself_alone(line: bytes, reason: str, tmp_path: Path) -> None:
    path = tmp_path / "pairs.jsonl"
    good = json.dumps(ROW).encode()
    path.write_bytes(b"\n".join([good, line, good]) + b"\n")
    assert [told(outcome) for outcome in read(path)] == [
        "u:q | a:x | a:y",
        f"{reason} @ pairs.jsonl:2",
        "u:q | a:x | a:y",
    ]


def test_null_and_empty_answers(tmp_path: Path) -> None:
    """case: null-answer."""
    path = write(
        tmp_path / "pairs.jsonl",
        [
            {"prompt": "a", "chosen": "b", "rejected": "c"},
            {"prompt": "d", "chosen": "e", "rejected": "f"},
            {"prompt": "g", "chosen": "h", "rejected": None},
            {"prompt": "i", "chosen": "", "rejected": "k"},
        ],
    )
    found = read(path)
    assert [isinstance(outcome, Pair) for outcome in found] == [True, True, False, False]
    assert [(o.locator, o.reason, o.detail) for o in found if isinstance(o, Rejection)] == [
        ("pairs.jsonl:3", "null", "field rejected: null"),
        ("pairs.jsonl:4", "empty", "field chosen: empty"),
    ]


@pytest.mark.parametrize("chunk", [1, 512])
@pytest.mark.parametrize("names", [("0", "1"), ("1", "0")])
def test_column_that_is_null_in_the_first_file(names: tuple[str, str], chunk: int, tmp_path: Path) -> None:
    """case: late-type."""
    none = [{"prompt": f"p{i}", "chosen": "a", "rejected": "b", "system": None} for i in (1, 2)]
    some = [{"prompt": "p3", "chosen": "a", "rejected": "b", "system": "forum"}]
    write(tmp_path / f"part{names[0]}.jsonl", none)
    write(tmp_path / f"part{names[1]}.jsonl", some)
    found = sorted(told(outcome) for outcome in read(tmp_path, rows=chunk))
    assert found == ["s:forum u:p3 | a:a | a:b", "u:p1 | a:a | a:b", "u:p2 | a:a | a:b"]


def test_column_that_only_one_file_has(tmp_path: Path) -> None:
    """case: missing-column."""
    plain, more = {"prompt": "p", "chosen": "a", "rejected": "b"}, {"system": "Be brief.", "note": 1}
    for first, second in ((plain, {**plain, **more}), ({**plain, **more}, plain)):
        write(tmp_path / "part0.jsonl", [first])
        write(tmp_path / "part1.jsonl", [second])
        assert {told(outcome) for outcome in read(tmp_path)} == {"u:p | a:a | a:b", "s:Be brief. u:p | a:a | a:b"}
        assert open_source(spec(tmp_path)).ignored_columns == ("note",)


def tool_row(arguments: dict[str, Any]) -> dict[str, Any]:
    call = {"role": "assistant", "tool_calls": [{"name": "w", "arguments": arguments}]}
    prompt = [{"role": "user", "content": "q"}, call, {"role": "tool", "content": "3"}]
    answers = {side: [{"role": "assistant", "content": side}] for side in ("chosen", "rejected")}
    return {"prompt": prompt, **answers}


@pytest.mark.parametrize("kind", ["one file", "two files", "parquet", "arrow"])
def test_arguments_gain_no_keys(kind: str, tmp_path: Path) -> None:
    """case: tool-null-padding: a struct column pads them with nulls, which are taken out again."""
    given = [{"city": "Oslo"}, {"x": 1, "y": 2}]
    table = pa.Table.from_pylist([tool_row(arguments) for arguments in given])
    if kind == "two files":
        for index, arguments in enumerate(given):
            write(tmp_path / f"{index}.jsonl", [tool_row(arguments)])
    elif kind == "one file":
        write(tmp_path / "pairs.jsonl", [tool_row(arguments) for arguments in given])
    elif kind == "parquet":
        pq.write_table(table, tmp_path / "pairs.parquet")
    else:
        feather.write_feather(table, tmp_path / "pairs.arrow", compression="uncompressed")
    found = read(tmp_path)
    calls = [o.prompt[1].tool_calls[0]["function"]["arguments"] for o in found if isinstance(o, Pair)]
    assert [json.dumps(call) for call in calls] == ['{"city": "Oslo"}', '{"x": 1, "y": 2}']
    assert [o.prompt[0].to_dict() for o in found if isinstance(o, Pair)] == [{"role": "user", "content": "q"}] * 2


def as_file(kind: str, folder: Path, given: list[dict[str, Any]]) -> Path:
    """The same rows in a file of any kind."""
    lines = "".join(json.dumps(row) + "\n" for row in given).encode()
    text = io.StringIO()
    writer = csv.DictWriter(text, list(given[0]))
    writer.writeheader()
    writer.writerows(given)
    contents = {
        "pairs.jsonl": lines,
        "pairs.jsonl.gz": gzip.compress(lines),
        "pairs.ndjson.zst": zstd(lines),
        "plain-name.jsonl": gzip.compress(lines),
        "pairs.json": json.dumps(given, indent=1).encode(),
        "lines.json": lines,
        "pairs.csv": text.getvalue().encode(),
        "pairs.csv.gz": gzip.compress(b"\xef\xbb\xbf" + text.getvalue().encode()),
    }
    path = folder / kind
    table = pa.Table.from_pylist(given)
    if kind == "pairs.parquet":
        pq.write_table(table, path, row_group_size=3)
    elif kind == "file.arrow":
        with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, table.schema) as stream:
            stream.write_table(table, max_chunksize=3)
    elif kind == "stream.arrow":
        with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_stream(sink, table.schema) as stream:
            stream.write_table(table)
    else:
        path.write_bytes(contents[kind])
    return path


KINDS = [
    *("pairs.jsonl", "pairs.jsonl.gz", "pairs.ndjson.zst", "plain-name.jsonl", "pairs.json", "lines.json"),
    *("pairs.csv", "pairs.csv.gz", "pairs.parquet", "file.arrow", "stream.arrow"),
]


@pytest.mark.parametrize("kind", KINDS)
def test_kinds_of_file_hold_the_same_rows(kind: str, tmp_path: Path) -> None:
    given = [{"prompt": f'q\n{i}, "ü"', "chosen": "x", "rejected": "y" if i != 4 else "x"} for i in range(8)]
    path = as_file(kind, tmp_path, given)
    source = open_source(spec(path))
    taken = list(chunks(source, 3))
    assert [len(chunk) for chunk in taken][:2] == [3, 3]
    assert sum(map(len, taken)) == 8
    found = [outcome for chunk in pickle.loads(pickle.dumps(taken)) for outcome in parse(chunk)]
    assert [o.prompt[0].content if isinstance(o, Pair) else o.reason for o in found] == [
        row["prompt"] if i != 4 else "identical" for i, row in enumerate(given)
    ]
    lines = {"pairs.json": "#5", "pairs.parquet": "#row 5", "file.arrow": "#row 5", "stream.arrow": "#row 5"}
    at = lines.get(kind, ":10" if "csv" in kind else ":5")  # a CSV prompt of two lines: row 5 begins at line 2 + 4 * 2
    assert found[4].locator == kind + at
    assert isinstance(found[4], Rejection)
    assert json.loads(found[4].row or "") == given[4]


def test_csv_cells(tmp_path: Path) -> None:
    """A list of messages is told by its JSON; a text that looks like another list stays text."""
    talk = json.dumps([{"role": "user", "content": "q"}, {"role": "assistant", "content": "x"}])
    other = json.dumps([{"role": "user", "content": "q"}, {"role": "assistant", "content": '[{"a": 1}]'}])
    path = tmp_path / "pairs.csv"
    with path.open("w", newline="", encoding="utf-8") as stream:
        csv.writer(stream).writerows(
            [["chosen", "rejected"], [talk, other], [], ["x"], [talk, '[{"a": 1}]'], ["a", "b", "c"]]
        )
    assert [told(outcome) for outcome in read(path)] == [
        'u:q | a:x | a:[{"a": 1}]',
        "broken_csv @ pairs.csv:4",
        "no_shared_prompt @ pairs.csv:5",
        "broken_csv @ pairs.csv:6",
    ]


def test_csv_lists_of_scored_answers(tmp_path: Path) -> None:
    path = tmp_path / "pairs.csv"
    with path.open("w", newline="", encoding="utf-8") as stream:
        csv.writer(stream).writerows([["prompt", "completions", "scores"], ["q", '["y", "x"]', "[1, 2.5]"]])
    assert [told(outcome) for outcome in read(path)] == ["u:q | a:x | a:y"]


def test_table_texts_that_are_not_utf8(tmp_path: Path) -> None:
    table = pa.Table.from_pylist(rows(3))
    raw = pa.array([b"q0", b"q\xff", b"q2"]).cast(pa.binary())
    broken = table.set_column(0, "prompt", pa.Array.from_buffers(pa.string(), 3, raw.buffers()))
    pq.write_table(broken, tmp_path / "pairs.parquet")
    assert [told(outcome) for outcome in read(tmp_path)] == [
        "u:q0 | a:x | a:y",
        "not_utf8 @ pairs.parquet#row 2",
        "u:q2 | a:x | a:y",
    ]


def test_csv_that_ends_inside_a_cell(tmp_path: Path) -> None:
    path = tmp_path / "pairs.csv"
    path.write_bytes(b'prompt,chosen,rejected\nq,x,y\nq,"x\xff",y\nq,x,"y and')
    assert [told(outcome) for outcome in read(path)] == [
        "u:q | a:x | a:y",
        "not_utf8 @ pairs.csv:3",
        "truncated @ pairs.csv:4",
    ]


def test_csv_header_that_names_a_column_twice(tmp_path: Path) -> None:
    path = tmp_path / "pairs.csv"
    path.write_text("prompt,chosen,chosen\nq,x,y\n", encoding="utf-8")
    with pytest.raises(SourceError, match=r"pairs.csv:1: the header names chosen more than once"):
        open_source(spec(path))


def test_files_are_taken_by_name_and_named_from_the_root(tmp_path: Path) -> None:
    folder = tmp_path / "set"
    (folder / "b").mkdir(parents=True)
    (folder / ".cache").mkdir()
    write(folder / "b" / "two.jsonl", [{**ROW, "prompt": "2"}])
    write(folder / "a.jsonl", [{**ROW, "prompt": "1"}])
    write(folder / ".cache" / "no.jsonl", [ROW])
    (folder / "README.md").write_text("no rows")
    (folder / "dataset_info.json").write_text("{}")
    assert [(told(o), o.locator) for o in read(folder)] == [
        ("u:1 | a:x | a:y", "a.jsonl:1"),
        ("u:2 | a:x | a:y", "b/two.jsonl:1"),
    ]
    patterns = (str(folder / "b" / "*.jsonl"), f"file://{folder}/a.jsonl", str(folder / "**" / "*.jsonl"))
    assert [o.locator for o in read(patterns[0], patterns[1])] == ["a.jsonl:1", "two.jsonl:1"]
    assert [o.locator for o in read(patterns[1], patterns[1])] == ["a.jsonl:1"]
    assert "b/two.jsonl:1" in [o.locator for o in read(patterns[2])]


def test_a_literal_name_is_no_glob(tmp_path: Path) -> None:
    path = write(tmp_path / "pairs[1].jsonl", [ROW])
    assert [o.locator for o in read(path)] == ["pairs[1].jsonl:1"]


def test_files_of_one_name_are_told_apart(tmp_path: Path) -> None:
    for name in ("mon", "tue"):
        (tmp_path / name).mkdir()
        write(tmp_path / name / "pairs.jsonl", [ROW])
    assert [o.locator for o in read(tmp_path / "mon", tmp_path / "tue")] == ["mon/pairs.jsonl:1", "tue/pairs.jsonl:1"]
    deep = tmp_path / "deep" / "mon"
    deep.mkdir(parents=True)
    write(deep / "pairs.jsonl", [ROW])
    with pytest.raises(SourceError, match=r"both called mon/pairs.jsonl"):
        open_source(spec(tmp_path / "mon", deep))


def test_any_file_system(tmp_path: Path) -> None:
    memory = fsspec.filesystem("memory")
    memory.pipe("/bucket/pairs.jsonl", json.dumps(ROW).encode())
    try:
        assert [o.locator for o in read("memory://bucket/pairs.jsonl")] == ["pairs.jsonl:1"]
        assert [o.locator for o in read("memory://bucket/*.jsonl")] == ["pairs.jsonl:1"]
        assert [o.locator for o in read("memory://bucket")] == ["pairs.jsonl:1"]
    finally:
        memory.rm("/bucket", recursive=True)


def unreadable(folder: Path) -> dict[str, tuple[str, str]]:
    """Input -> what the refusal says."""
    (folder / "empty").mkdir()
    (folder / "notes.txt").write_text("x")
    (folder / "none.jsonl").write_text("\n \n")
    (folder / "bad.parquet").write_bytes(b"PAR1 not really")
    (folder / "bad.arrow").write_bytes(b"ARROW1\0\0 not really")
    (folder / "bad.jsonl.gz").write_bytes(b"plain")
    (folder / "hurt.jsonl.gz").write_bytes(gzip.compress(json.dumps(ROW).encode())[:-8] + b"\0" * 8)
    (folder / "object.json").write_text('{\n "data": []\n}')
    (folder / "broken.json").write_text('[{"a": 1}, {"a" 2}, {"a": 3}, {"a": 4}]')
    (folder / "table.parquet.gz").write_bytes(gzip.compress(b"x"))
    return {
        "missing": ("missing.jsonl", "there is no file or folder"),
        "no match": ("*.csv", "matches no file"),
        "empty folder": ("empty", "holds no file of .jsonl"),
        "unknown kind": ("notes.txt", "is of no known kind; known are .jsonl"),
        "packed table": ("table.parquet.gz", "is of no known kind"),
        "no rows": ("none.jsonl", "no row can be read from none.jsonl"),
        "not parquet": ("bad.parquet", "bad.parquet: cannot be read"),
        "not arrow": ("bad.arrow", "bad.arrow: cannot be read"),
        "not gzip": ("bad.jsonl.gz", "is named gzip, but its first bytes b'plai' are not"),
        "damaged gzip": ("hurt.jsonl.gz", "hurt.jsonl.gz: cannot be read"),
        "one object": ("object.json", "neither a JSON array of rows nor one JSON object a line"),
        "broken array": ("broken.json", "broken.json#2: broken JSON"),
    }


def test_what_is_wrong_with_a_whole_file_is_an_error(tmp_path: Path) -> None:
    for given, sentence in unreadable(tmp_path).values():
        with pytest.raises(SourceError) as refusal:
            open_source(spec(tmp_path / given))
        assert sentence in str(refusal.value)
    with pytest.raises(SourceError, match="cannot be looked up"):
        open_source(spec("nothing://x/pairs.jsonl"))
    with pytest.raises(SourceError, match="no input at all"):
        open_source(spec())


def test_fingerprint_is_content(tmp_path: Path) -> None:
    """Not compression, not the place, not the names as long as their order stays; but every byte and every order."""
    lines = "".join(json.dumps(row) + "\n" for row in rows(4)).encode()
    seen: dict[str, str] = {}
    for case, contents in {
        "plain": {"a.jsonl": lines, "b.jsonl": b"{}\n"},
        "packed": {"a.jsonl.gz": gzip.compress(lines), "b.jsonl.zst": zstd(b"{}\n")},
        "renamed": {"x.jsonl": lines, "y.jsonl": b"{}\n"},
        "other order": {"b.jsonl": lines, "a.jsonl": b"{}\n"},
        "joined": {"a.jsonl": lines + b"{}\n"},
        "one byte": {"a.jsonl": lines.replace(b"q3", b"q4"), "b.jsonl": b"{}\n"},
    }.items():
        folder = tmp_path / case
        folder.mkdir()
        for name, content in contents.items():
            (folder / name).write_bytes(content)
        seen[case] = open_source(spec(folder)).fingerprint
    assert seen["plain"].startswith("src1:")
    assert seen["plain"] == seen["packed"] == seen["renamed"]
    assert len({seen[case] for case in ("plain", "other order", "joined", "one byte")}) == 4


def test_fingerprint_holds_format_and_mapping(tmp_path: Path) -> None:
    """case: extra-columns; a format found and the same format asked for are one."""
    path = write(tmp_path / "pairs.jsonl", [{**ROW, "good": "z"}])
    plain, asked, mapped = (
        open_source(spec(path, format=format, mapping=mapping)).fingerprint
        for format, mapping in (("auto", {}), ("explicit", {}), ("auto", {"chosen": "good"}))
    )
    assert plain == asked != mapped


def test_chunks_are_bounded_by_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "CHUNK_BYTES", 1000)
    path = write(tmp_path / "pairs.jsonl", [{**ROW, "chosen": "x" * 600} for _ in range(5)])
    assert [len(chunk) for chunk in chunks(open_source(spec(path)))] == [2, 2, 1]


@pytest.mark.parametrize("kind", ["pairs.jsonl", "pairs.jsonl.gz", "pairs.json", "pairs.csv"])
def test_memory_does_not_grow_with_the_file(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = as_file(kind, tmp_path, [{**ROW, "chosen": "x" * 1000 + str(i)} for i in range(4000)])
    monkeypatch.setattr(files, "BLOCK", 1 << 14)
    source = open_source(spec(path))
    tracemalloc.start()
    try:
        assert sum(len(chunk) for chunk in chunks(source, 16)) == 4000
        assert 1 << 14 < tracemalloc.get_traced_memory()[1] < 1 << 19  # the rows are 4 MB
    finally:
        tracemalloc.stop()


def test_long_rows_of_a_table_come_in_small_batches(tmp_path: Path) -> None:
    given = [{**ROW, "chosen": f"{i}" + "x" * (3 << 20)} for i in range(6)]
    for path in (as_file("pairs.parquet", tmp_path, given), as_file("stream.arrow", tmp_path, given)):
        taken = list(chunks(open_source(spec(path))))
        assert sum(map(len, taken)) == 6
        assert max(len(chunk.rows) for chunk in taken) < 10 << 20
        path.unlink()


def test_unread_columns_of_a_table_stay_in_the_file(tmp_path: Path) -> None:
    table = pa.table({**{name: [value] for name, value in ROW.items()}, "picture": [b"\0" * 100_000]})
    pq.write_table(table, tmp_path / "pairs.parquet")
    source = open_source(spec(tmp_path))
    (chunk,) = chunks(source)
    assert source.ignored_columns == ("picture",)
    assert len(chunk.rows) < 5000


@pytest.fixture
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


@pytest.mark.usefixtures("_own_cache")
def test_dataset_repository(tmp_path: Path) -> None:
    repo = tmp_path / "prefs"
    (repo / "data").mkdir(parents=True)
    for split, prompts in (("train", ("a", "b")), ("test", ("c",))):
        table = pa.Table.from_pylist([{**ROW, "prompt": prompt, "n": 1} for prompt in prompts])
        pq.write_table(table, repo / "data" / f"{split}-00000.parquet")
    source = open_source(spec(f"hf://{repo}"))
    assert (source.format, source.ignored_columns) == ("explicit", ("n",))
    found = [o for chunk in chunks(source, 1) for o in parse(chunk)]
    assert [(told(o), o.locator) for o in found] == [
        ("u:a | a:x | a:y", "prefs/train#row 1"),
        ("u:b | a:x | a:y", "prefs/train#row 2"),
    ]
    assert [told(o) for o in read(f"hf://{repo}?split=test")] == ["u:c | a:x | a:y"]
    assert open_source(spec(f"hf://{repo}?split=test")).fingerprint != source.fingerprint
    with pytest.raises(SourceError, match="unknown option part; known: config, split"):
        open_source(spec(f"hf://{repo}?part=1"))
    with pytest.raises(SourceError, match="cannot be loaded"):
        open_source(spec(f"hf://{repo}-gone"))


@pytest.mark.usefixtures("_own_cache")
def test_dataset_repository_whose_split_is_not_told(tmp_path: Path) -> None:
    repo = tmp_path / "prefs"
    (repo / "data").mkdir(parents=True)
    for split in ("test", "validation"):
        write(repo / "data" / f"{split}.jsonl", [ROW])
    with pytest.raises(SourceError, match=r"has splits .*test.*; name one with \?split=NAME"):
        open_source(spec(f"hf://{repo}"))
