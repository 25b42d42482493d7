"""The configuration: what is accepted, what is refused and in which words."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
from pydantic import BaseModel, ValidationError

from training import config as config_module
from training.config import ProjectConfig, RunConfig, Topology, dump, load_project, load_run, parse
from training.errors import ConfigError

ROOT = Path(__file__).parents[2]


def write(folder: Path, text: str) -> Path:
    path = folder / "run.toml"
    path.write_text(text, encoding="utf-8")
    return path


@pytest.mark.parametrize(
    ("topology", "multiple"),
    [
        (Topology(), 1),
        (Topology(dp_replicate=2, dp_shard=3), 1),
        (Topology(ulysses=4), 4),
        (Topology(cp=2), 4),
        (Topology(cp=3, ulysses=2), 12),
    ],
)
def test_a_row_is_padded_to_twice_cp_times_ulysses_or_ulysses_alone(topology: Topology, multiple: int) -> None:
    assert topology.multiple == multiple


def test_paths_are_relative_to_the_file_that_names_them(tmp_path: Path) -> None:
    run = load_run(write(tmp_path, '[data]\ndatasets = ["d", "/abs", "s3://b/d"]\n[model]\npath = "m"\n'))
    assert run.data.datasets == (str(tmp_path / "d"), "/abs", "s3://b/d")
    assert run.model.path == str(tmp_path / "m")


def test_a_project_gives_the_run_that_trains_on_given_datasets(tmp_path: Path) -> None:
    text = '[plan]\npairs_per_step = 8\n[sources.a]\nfiles = ["a.jsonl"]\n[tokenizer]\npath = "t"\n'
    project = load_project(write(tmp_path, text))
    assert project.sources["a"].files == (str(tmp_path / "a.jsonl"),)
    assert project.store == str(tmp_path / "store")
    run = project.run(("x", "y"))
    assert type(run) is RunConfig
    assert (run.data.datasets, run.plan.pairs_per_step) == (("x", "y"), 8)


def test_a_configuration_cannot_be_changed_after_it_was_checked() -> None:
    with pytest.raises(ValidationError, match="frozen"):
        RunConfig().plan.epochs = 2  # pyright: ignore[reportAttributeAccessIssue]


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"plan": {"pairs_per_stp": 3}}, ["unknown key plan.pairs_per_stp", "pairs_per_step"]),
        ({"plann": {}}, ["unknown key plann", "plan"]),
        ({"sources": {"a": {"files": ["x"], "fromat": "y"}}}, ["unknown key sources.a.fromat", "format"]),
        ({"plan": {"epochs": 0}, "optimizer": {"lr": "x"}}, ["plan.epochs = 0", "optimizer.lr = 'x'"]),
        ({"devices": {"processes": 3}}, ["processes = 3", "1 * 1 * 1 * 1 = 1"]),
    ],
)
def test_what_is_wrong_is_named_with_its_value_and_the_way_out(values: dict[str, object], said: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(values, ProjectConfig, where="pairledger.toml")
    for words in ["pairledger.toml", *said]:
        assert words in str(caught.value)
    assert caught.value.exit_code == 2


@pytest.mark.parametrize(("text", "said"), [(None, "no such"), ("[plan\n", "is not TOML")])
def test_an_unreadable_file_is_named(tmp_path: Path, text: str | None, said: str) -> None:
    path = tmp_path / "run.toml" if text is None else write(tmp_path, text)
    with pytest.raises(ConfigError, match=said) as caught:
        load_run(path)
    assert str(path) in str(caught.value)


def fields() -> set[tuple[str, str]]:
    sections = [
        kind
        for kind in vars(config_module).values()
        if isinstance(kind, type) and issubclass(kind, BaseModel) and kind.__module__ == config_module.__name__
    ]
    return {(kind.__name__, name) for kind in sections for name in kind.__annotations__ if name != "model_config"}


def read_names() -> set[str]:
    """Every attribute that code reads, outside the declarations themselves, over the rooms that use a configuration."""
    names: set[str] = set()
    for room in ("training", "assets", "pipeline"):
        for path in (ROOT / room).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
                    names.add(node.attr)
    return names


def test_no_field_is_declared_that_nothing_reads() -> None:
    declared = fields()
    assert len(declared) > 40  # the walk found the sections
    read = read_names()
    assert "pairs_per_step" in read
    assert "no_such_field" not in read
    unread = sorted(f"{kind}.{name}" for kind, name in declared if name not in read)
    assert not unread, f"declared and never read: {unread}"


def test_dump_is_read_back(tmp_path):
    config = RunConfig.model_validate(
        {
            "data": {"datasets": ['/a b/\u00e9\U0001f600\x7f"\\\n'], "weights": {"org/a.b": 0.1, "c": 2.0}},
            "plan": {"buckets": [128, 256]},
            "model": {"path": "/m"},
            "optimizer": {"lr": 1e-12},
        }
    )
    path = tmp_path / "RUN.toml"
    path.write_text(dump(config), encoding="utf-8")
    assert load_run(path) == config
