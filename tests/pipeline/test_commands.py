"""The commands on a small task, from preference files to a report, as a person would call them."""

import json
import re
from pathlib import Path

import pytest

from pipeline.cli import main
from pipeline.demo.base import random_model
from pipeline.demo.task import write_tokenizer
from training.data.tokenizer import load_tokenizer

RUN = """
[data]
datasets = ["prepared"]
[plan]
pairs_per_step = 4
pack_tokens = 128
[model]
path = "model"
[optimizer]
lr = 1e-3
[devices]
kind = "cpu"
"""
TEMPLATE = """{% for m in messages %}{{ m.role }}: {{ m.content }}<|im_end|>{% endfor %}
{%- if add_generation_prompt %}assistant: {% endif %}"""
QUESTION = "Which is larger, {} or {}?"


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    """Ten pairs and one that is not let in, a tokenizer, a model."""
    place = tmp_path_factory.mktemp("commands")
    rows = [{"asked": QUESTION.format(n, n + 1), "chosen": f"{n + 1}", "rejected": f"{n}"} for n in range(10, 20)]
    rows.append({"asked": "Which?", "chosen": "same", "rejected": "same"})
    (place / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    write_tokenizer(place / "tokenizer")
    random_model(place / "model", load_tokenizer(place / "tokenizer"), seed=0)
    (place / "RUN.toml").write_text(RUN)
    return place


@pytest.fixture
def at(place, monkeypatch) -> Path:
    monkeypatch.chdir(place)
    return place


def out(capsys, *argv: str) -> str:
    """What a command that must succeed prints."""
    capsys.readouterr()
    assert main(list(argv)) == 0
    return capsys.readouterr().out


def prepared(capsys) -> dict:
    words = "prepare pairs.jsonl --tokenizer tokenizer --out prepared --map prompt=asked --workers 1 --json"
    return json.loads(out(capsys, *words.split()))


def test_prepare_gives_the_counts_and_finds_its_dataset_again(at, capsys):
    found = prepared(capsys)
    assert {name: found[name] for name in ("rows", "pairs", "quarantined")} == {
        "rows": 11,
        "pairs": 10,
        "quarantined": 1,
    }
    assert found["reasons"] == {"identical": 1}
    # 12 tokens of the question, a frame of 8; a number of two digits and the end of turn on each side
    assert (found["tokens"]["prompt"], found["tokens"]["loss"]) == (10 * 20, 10 * 6)
    again = prepared(capsys)
    assert again["reused"] and again["dataset"] == found["dataset"]
    assert len((at / "prepared" / "quarantine.jsonl").read_text().splitlines()) == 1
    said = out(capsys, *"prepare pairs.jsonl --tokenizer tokenizer --out prepared --map prompt=asked".split())
    assert "10 pairs" in said and "verified" in said and "identical" in said


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        ("prepare no.jsonl --tokenizer tokenizer --out x", 3, "no.jsonl"),
        ("prepare pairs.jsonl --tokenizer no --out x --map prompt=asked", 3, "no"),
        ("prepare pairs.jsonl --tokenizer tokenizer --out x", 3, "no prompt column"),
        ("prepare pairs.jsonl --tokenizer tokenizer --out x --format explict", 3, "explicit"),
        ("prepare pairs.jsonl --tokenizer tokenizer --out x --map prompt", 2, "--map prompt=question"),
        ("prepare pairs.jsonl --tokenizer tokenizer --out x --map prompt=asked --max-quarantine 0", 3, "quarantine"),
        (
            "prepare pairs.jsonl --tokenizer tokenizer --out x --map prompt=asked --max-tokens 0",
            2,
            "limits.max_tokens",
        ),
        (
            "prepare pairs.jsonl --tokenizer tokenizer --out x --map prompt=asked --max-tokens 4",
            3,
            "no room for an answer",
        ),
        ("inspect prepared --row 10", 2, "rows 0 to 9"),
        ("inspect prepared --pair pair1:zz", 3, "holds no pair pair1:zz"),
        ("plan prepared --pairs-per-step 4 --pack-tokens 20", 3, "pack_tokens"),
    ],
)
def test_an_input_that_is_refused_is_one_sentence(at, capsys, words, code, said):
    prepared(capsys)
    assert main(words.split()) == code
    err = capsys.readouterr().err
    assert said in err
    assert "Traceback" not in err
    assert not (at / "x" / "manifest.json").exists()


def test_inspect_shows_a_pair_as_the_model_sees_it(at, capsys):
    prepared(capsys)
    pair = json.loads(out(capsys, "inspect", "prepared", "--row", "3", "--json"))
    assert pair["locator"] == "pairs.jsonl:4"
    shown = out(capsys, "inspect", "prepared", "--pair", pair["pair_id"], "--ids")
    assert QUESTION.format(13, 14) in re.sub(r"·\d+ ", "", shown)
    assert "<|im_end|>·2" in shown
    assert f"·{pair['chosen_ids'][0]}" in shown
    shown = out(capsys, "inspect", "prepared", "--row", "3")
    assert " ".join(map(str, pair["rejected_ids"])) in shown
    assert f"{len(pair['chosen_ids'])} tokens, {len(pair['chosen_ids'])} supervised" in shown
    whole = out(capsys, "inspect", "prepared")
    assert "identical" in whole and "23.1 %" in whole  # 6 of 26 tokens are learned from


def test_inspect_says_why_it_shows_ids_only(at, capsys, tmp_path):
    write_tokenizer(tmp_path / "gone")
    assert main(f"prepare pairs.jsonl --tokenizer {tmp_path}/gone --out {tmp_path}/d --map prompt=asked".split()) == 0
    (tmp_path / "gone" / "tokenizer.json").unlink()
    capsys.readouterr()
    assert main(["inspect", f"{tmp_path}/d", "--row", "0"]) == 0
    captured = capsys.readouterr()
    assert "ids only" in captured.err
    assert "·2" in captured.out and "larger" not in captured.out


def test_diff_names_the_input_that_made_the_difference(at, capsys, tmp_path):
    one = prepared(capsys)
    lines = (at / "pairs.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "pairs.jsonl").write_text("".join(lines[1:]))
    words = f"prepare {tmp_path}/pairs.jsonl --tokenizer tokenizer --out {tmp_path}/b --map prompt=asked --json"
    main(words.split())
    found = json.loads(out(capsys, "diff", "prepared", f"{tmp_path}/b", "--json"))
    first = json.loads(out(capsys, "inspect", "prepared", "--row", "0", "--json"))["pair_id"]
    assert list(found["inputs_that_differ"]) == ["source"]
    assert (found["only_in_a"], found["only_in_b"], found["other_tokens"]) == ([first], [], [])
    (tmp_path / "t.jinja").write_text(TEMPLATE)
    words = f"prepare pairs.jsonl --tokenizer tokenizer --out {tmp_path}/c --map prompt=asked"
    words += f" --template {tmp_path}/t.jinja"
    main(words.split())
    found = json.loads(out(capsys, "diff", "prepared", f"{tmp_path}/c", "--json"))
    assert "template" in found["inputs_that_differ"] and "source" not in found["inputs_that_differ"]
    assert len(found["other_tokens"]) == 10
    assert out(capsys, "diff", "prepared", "prepared").strip() == f"equal: {one['dataset']}"


def test_a_run_counts_what_its_plan_said(at, capsys):
    prepared(capsys)
    words = "plan prepared --pairs-per-step 4 --pack-tokens 128"
    planned = json.loads(out(capsys, *words.split(), "--json"))
    # ten pairs of 26 tokens: 4 in a pack of 128, the last step has two
    assert (planned["steps"], planned["packs"], planned["source_tokens"], planned["loss_tokens"]) == (3, 3, 260, 60)
    assert planned["pack_fill"] == pytest.approx(260 / 384)
    assert "predicted, by step" in out(capsys, *words.split())
    trained = json.loads(out(capsys, "train", "--config", "RUN.toml", "--json"))
    assert trained["finished"] and trained["steps"] == 3
    again = json.loads(out(capsys, "train", "--config", "RUN.toml", "--json"))
    assert again["attempt"] is None and again["run_id"] == trained["run_id"]
    sql = "SELECT step, source_tokens, loss_tokens, pairs, packs FROM current_step ORDER BY step"
    counted = json.loads(out(capsys, "ledger", "query", "--json", sql))
    assert counted == [{name: step[name] for name in counted[0]} for step in planned["by_step"]]
    assert Path(out(capsys, "ledger", "path").strip()).exists()
    assert json.loads(out(capsys, "ledger", "rebuild", "--json"))["files"] > 0
    assert "67.7 %" in out(capsys, "ledger", "query", "SELECT pack_fill FROM run_summary")
    out(capsys, "report", trained["run_id"][:9], "--out", "report.html")
    assert trained["run_id"] in (at / "report.html").read_text()


@pytest.mark.parametrize(
    ("change", "code", "said"),
    [
        (("pairs_per_step", "pairs_per_stp"), 2, "did you mean pairs_per_step"),
        (('kind = "cpu"', 'kind = "npu"'), 5, "npu"),
        (('path = "model"', 'path = "no-model"'), 3, "no-model"),
        (('"prepared"', '"nowhere"'), 3, "nowhere"),
    ],
)
def test_a_run_that_cannot_start_says_so(at, capsys, change, code, said):
    prepared(capsys)
    (at / "OTHER.toml").write_text(RUN.replace(*change))
    assert main(["train", "--config", "OTHER.toml"]) == code
    err = capsys.readouterr().err
    assert said in err and err.startswith("pairledger train: ") and err.count("\n") == 1
