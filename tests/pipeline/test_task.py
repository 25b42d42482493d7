"""The demonstration's task: what makes its figures honest."""

import json
import re
from pathlib import Path

import pytest

from pipeline.demo.task import PAIRS, PROMPTS, put, write_task
from training.config import LimitsConfig, load_project
from training.data.plan import make_plan
from training.data.prepare import prepare
from training.data.shards import Dataset
from training.data.sources import SourceSpec

DEMO = Path(__file__).parents[2] / "pipeline" / "demo.toml"


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("task")
    write_task(folder, seed=0)
    return folder


@pytest.fixture(scope="module")
def datasets(folder) -> list[Dataset]:
    limits = LimitsConfig(max_tokens=96)
    return [
        prepare(
            SourceSpec(name=name, inputs=(str(folder / f"{name}.jsonl"),)),
            folder / "tokenizer",
            folder / "prepared" / name,
            limits=limits,
            workers=1,
        ).dataset
        for name in PROMPTS
    ]


def rows(folder: Path, name: str) -> list[dict[str, str]]:
    return [json.loads(line) for line in (folder / f"{name}.jsonl").read_text().splitlines()]


def numbers(row: dict[str, str]) -> frozenset[int]:
    return frozenset(map(int, re.findall(r"\d+", row["prompt"])))


def test_every_two_numbers_meet_in_one_question_of_one_source(folder):
    asked = [numbers(row) for name in PROMPTS for row in rows(folder, name)]
    assert len(asked) == len(set(asked)) == PAIRS
    assert all(len(two) == 2 for two in asked)
    undecided = {numbers(row) for row in rows(folder, "undecided")}
    assert len(undecided) == 90 * 89 // 2 - PAIRS
    assert not undecided & set(asked)


def test_the_larger_number_is_chosen_and_stands_on_either_side(folder):
    for name in PROMPTS:
        first = [int(re.findall(r"\d+", row["prompt"])[0]) == max(numbers(row)) for row in rows(folder, name)]
        assert 0.45 < sum(first) / len(first) < 0.55
        for row in rows(folder, name):
            assert (row["chosen"], row["rejected"]) == (
                f"{max(numbers(row))} is larger.",
                f"{min(numbers(row))} is larger.",
            )


def test_the_base_model_is_told_nothing(folder):
    said = rows(folder, "undecided")
    answers: dict[str, list[str]] = {}
    for row in said:
        answers.setdefault(row["prompt"], []).append(row["chosen"])
    assert len(answers) * 2 == len(said)
    for prompt, chosen in answers.items():
        assert sorted(chosen) == sorted(f"{n} is larger." for n in numbers({"prompt": prompt}))


def test_held_out_questions_are_of_numbers_that_training_never_saw_together(folder, datasets):
    project = load_project(DEMO, base=folder)
    plan = make_plan(datasets, project.data, project.plan)
    by_id = {}
    for dataset, name in zip(datasets, PROMPTS, strict=True):
        columns = dataset.columns()
        by_id |= {
            id_: numbers(rows_of) for id_, rows_of in zip(columns.pair_id.to_pylist(), rows(folder, name), strict=True)
        }
    ids = plan.table.pair_id.to_pylist()
    held, trained = ({by_id[ids[i]] for i in part} for part in (plan.held_out, plan.train))
    assert len(held) > 200
    assert not held & trained


def test_the_sources_differ_plainly_in_loss_density(datasets):
    density = {}
    for dataset in datasets:
        columns = dataset.columns()
        tokens = columns.prompt.sum() + columns.chosen.sum() + columns.rejected.sum()
        density[columns.sources[0]] = (columns.chosen_loss.sum() + columns.rejected_loss.sum()) / tokens
    # two numbers of two digits: a ChatML frame of 8 tokens, 12 or 34 of the question, 6 of each answer
    assert density == {"short": pytest.approx(12 / 32), "wordy": pytest.approx(12 / 54)}


def test_writing_it_again_touches_nothing_and_another_seed_is_another_task(folder, tmp_path):
    before = {path: path.stat().st_mtime_ns for path in folder.glob("*.jsonl")}
    write_task(folder, seed=0)
    assert len(before) == 3
    assert before == {path: path.stat().st_mtime_ns for path in folder.glob("*.jsonl")}
    write_task(tmp_path, seed=1)
    assert (tmp_path / "short.jsonl").read_text() != (folder / "short.jsonl").read_text()
    tokenizers = [(place / "tokenizer" / "tokenizer.json").read_text() for place in (folder, tmp_path)]
    assert tokenizers[0] == tokenizers[1]


def test_a_file_is_replaced_whole(tmp_path):
    path = tmp_path / "a" / "b.txt"
    put(path, "one")
    put(path, "two")
    assert path.read_text() == "two"
    assert list(path.parent.iterdir()) == [path]
