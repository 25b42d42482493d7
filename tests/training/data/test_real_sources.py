"""Real preference sets: what comes out of each file is what a few lines written for that file alone say.

The counters below know one file's shape each and share nothing with the product.
"""

from __future__ import annotations

import gzip
import json
import os
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from tests.training.data.rows import spec
from training.data.pair import Pair
from training.data.sources import chunks, open_source, parse
from training.errors import SourceError

ROOT = os.environ.get("PAIRLEDGER_TEST_DATA")
pytestmark = pytest.mark.skipif(not ROOT, reason="set PAIRLEDGER_TEST_DATA to a folder with data/ and its MANIFEST.md")
DATA = Path(ROOT or ".") / "data"

Outcomes = Iterable[str]


def verdict(ours: Any, theirs: Any) -> str:
    for answer in (ours, theirs):
        if not isinstance(answer, str):
            return "not_text"
        if not answer.strip():
            return "empty"
    return "identical" if ours == theirs else "pair"


def plain(rows: list[Any]) -> Outcomes:
    return (verdict(row["chosen"], row["rejected"]) for row in rows)


def sharegpt(rows: list[Any]) -> Outcomes:
    return (verdict(row["chosen"]["value"], row["rejected"]["value"]) for row in rows)


def last_turns(rows: list[Any]) -> Outcomes:
    for row in rows:
        assert row["chosen"][:-1] == row["rejected"][:-1]
        yield verdict(row["chosen"][-1]["content"], row["rejected"][-1]["content"])


def blocks(rows: list[Any]) -> Outcomes:
    for row in rows:
        answers = (row[f"{side}_messages"][-1]["content"] for side in ("chosen", "rejected"))
        ours, theirs = ("".join(block["value"] for block in answer) for answer in answers)
        yield verdict(ours, theirs)


def product(rows: list[Any]) -> Outcomes:
    return (verdict(ours, theirs) for row in rows for ours in row["chosen"] for theirs in row["rejected"])


def renamed(rows: list[Any]) -> Outcomes:
    return (verdict(row["response_j"], row["response_k"]) for row in rows)


def labelled(rows: list[Any]) -> Outcomes:
    assert {row["label"] for row in rows} == {1, 2}
    return (verdict(row["output_1"], row["output_2"]) for row in rows)


def voted(rows: list[Any]) -> Outcomes:
    for row in rows:
        (winner, votes), *_ = Counter(row[f"annotator{i}"] for i in (1, 2, 3)).most_common()
        won = winner in (1, 2) and votes >= 2
        loser = row["response2"] if winner == 1 else row["response1"]
        yield verdict(row["response1"] if winner == 1 else row["response2"], loser) if won else "tie"


def ranked(rows: list[Any]) -> Outcomes:
    for row in rows:
        listed = sorted(row["completions"], key=lambda c: -c["overall_score"])  # the first of equals stays first
        best, low = listed[0], listed[-1]["overall_score"]
        worst = next(c for c in row["completions"] if c["overall_score"] == low)
        yield "tie" if best["overall_score"] == low else verdict(best["response"], worst["response"])


def transcripts(rows: list[Any]) -> Outcomes:
    for row in rows:
        ours, theirs = (row[side].rpartition("\n\nAssistant:") for side in ("chosen", "rejected"))
        yield verdict(ours[2].removeprefix(" "), theirs[2].removeprefix(" ")) if ours[0] == theirs[0] else "other"


FILES: dict[str, tuple[int, str, Callable[[list[Any]], Outcomes]]] = {
    "sharegpt_dpo_en.json": (300, "sharegpt", sharegpt),
    "sharegpt_dpo_zh.json": (300, "sharegpt", sharegpt),
    "lf_v1_dpo_blocks.jsonl": (10, "implicit", blocks),
    "alpaca_dpo_en.json": (1100, "alpaca", plain),
    "toolcall_dpo_zh.jsonl": (11, "sharegpt", plain),
    "stack_exchange_paired.json": (25, "explicit", renamed),
    "labelled_pairs_llmbar.jsonl": (419, "labelled", labelled),
    "voted_pairs_pandalm.json": (999, "labelled", voted),
    "ranked_completions_pandalm.jsonl": (159, "ranked", ranked),
    "multi_chosen_rmbench_code.jsonl": (57, "explicit", product),
    "hh_transcripts.jsonl.gz": (200, "implicit", transcripts),
    "trl_implicit_prompt.parquet": (250, "implicit", last_turns),
    "trl_explicit_strings.jsonl": (1100, "explicit", plain),
}
UNPAIRED = "kto_unpaired_en.json"
MAPPED = {"stack_exchange_paired.json": {"prompt": "question", "chosen": "response_j", "rejected": "response_k"}}


def load(name: str) -> list[Any]:
    path = DATA / name
    if name.endswith(".parquet"):
        return pq.read_table(path).to_pylist()
    text = gzip.decompress(path.read_bytes()).decode() if name.endswith(".gz") else path.read_text(encoding="utf-8")
    return (
        json.loads(text) if ".json" in name and ".jsonl" not in name else [json.loads(r) for r in text.split("\n") if r]
    )


def test_every_file_is_covered() -> None:
    assert {path.name for path in DATA.iterdir()} == {*FILES, UNPAIRED, "MANIFEST.md"}


@pytest.mark.parametrize("name", FILES)
def test_counts_are_those_of_an_independent_reading(name: str) -> None:
    rows, form, count = FILES[name]
    given = load(name)
    assert len(given) == rows
    source = open_source(spec(DATA / name, mapping=MAPPED.get(name)))
    assert source.format == form
    taken = list(chunks(source))
    assert sum(map(len, taken)) == rows
    found = Counter("pair" if isinstance(o, Pair) else o.reason for chunk in taken for o in parse(chunk))
    assert found == Counter(count(given))
    assert found["pair"] >= 0.8 * sum(found.values())


def test_unpaired_rows_are_refused() -> None:
    with pytest.raises(SourceError, match="unpaired rows"):
        open_source(spec(DATA / UNPAIRED))


def test_renamed_columns_need_a_mapping() -> None:
    with pytest.raises(SourceError, match=r"\[question, response_j, response_k\] fit no format"):
        open_source(spec(DATA / "stack_exchange_paired.json"))


def pairs(name: str) -> list[Pair]:
    source = open_source(spec(DATA / name))
    return [o for chunk in chunks(source) for o in parse(chunk) if isinstance(o, Pair)]


def test_one_set_in_two_shapes_is_the_same_pairs() -> None:
    """The Alpaca file and the file of strings that was derived from it."""
    alpaca, strings = (
        [(p.prompt, p.chosen, p.rejected) for p in pairs(name)]
        for name in ("alpaca_dpo_en.json", "trl_explicit_strings.jsonl")
    )
    assert len(alpaca) > 1000
    assert alpaca == strings


def test_histories_are_whole() -> None:
    """sharegpt_dpo_en has 80 system turns, and a history is the conversation as the row has it."""
    found = pairs("sharegpt_dpo_en.json")
    assert sum(p.prompt[0].role == "system" for p in found) == 80
    assert [len(p.prompt) for p in found] == [len(row["conversations"]) for row in load("sharegpt_dpo_en.json")]


def test_calls_are_read() -> None:
    found = pairs("toolcall_dpo_zh.jsonl")
    rows = load("toolcall_dpo_zh.jsonl")
    assert [len(p.tools) for p in found] == [len(json.loads(row["tools"])) for row in rows]
    calls = [m.tool_calls[0]["function"] for p in found for m in p.prompt if m.tool_calls]
    stated = [json.loads(t["value"]) for row in rows for t in row["conversations"] if t["from"] == "function_call"]
    assert len(calls) == 4
    assert calls == stated
