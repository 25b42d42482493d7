"""The code location: what it holds, and that it loads without torch."""

import subprocess
import sys

import dagster as dg
import pytest

from pipeline.definitions import build, defs
from tests.assets.small import TEXT
from training.config import ProjectConfig, load_project
from training.errors import ConfigError

GRAPH = {
    "preference_pairs": set(),
    "preference_shards": {"preference_pairs"},
    "reference_scores": {"preference_shards"},
    "step_plan": {"preference_shards"},
    "dpo_run": {"step_plan", "reference_scores"},
    "aligned_model": {"dpo_run"},
    "preference_eval": {"aligned_model"},
    "token_ledger": {"dpo_run", "preference_shards"},
    "fill_report": {"token_ledger"},
}
GROUPS = {
    "preferences": {"preference_pairs", "preference_shards", "reference_scores"},
    "training": {"step_plan", "dpo_run", "aligned_model", "preference_eval"},
    "ledger": {"token_ledger", "fill_report"},
}


@pytest.fixture
def project(tmp_path) -> ProjectConfig:
    (tmp_path / "pairledger.toml").write_text(TEXT)
    return load_project(tmp_path / "pairledger.toml")


def specs(project: ProjectConfig) -> dict[str, dg.AssetSpec]:
    return {spec.key.to_user_string(): spec for spec in build(project).resolve_all_asset_specs()}


def test_the_graph(project):
    found = specs(project)
    assert {name: {dep.asset_key.to_user_string() for dep in spec.deps} for name, spec in found.items()} == GRAPH
    assert {group: {name for name, spec in found.items() if spec.group_name == group} for group in GROUPS} == GROUPS


def test_every_asset_says_what_it_is_who_owns_it_and_of_what_kind(project):
    for name, spec in specs(project).items():
        assert len(spec.description or "") > 40, name
        assert spec.owners and spec.kinds and spec.code_version, name


def test_what_waits_for_what(project):
    graph = build(project).resolve_asset_graph()
    pools = {name: graph.get(dg.AssetKey(name)).pools for name in GRAPH}
    assert {name for name, found in pools.items() if found == {"accelerator"}} == {
        "reference_scores",
        "dpo_run",
        "preference_eval",
    }
    assert {name for name, found in pools.items() if found == {"ledger_writer"}} == {"token_ledger"}


def test_all_checks_block(project):
    graph = build(project).resolve_asset_graph()
    checks = {key: graph.get(key) for key in graph.asset_check_keys}
    assert {key.name for key in checks} == {
        "shards_match_manifest",
        "tokens_match_manifest",
        "targets_stay_inside",
        "quarantine_share",
        "plan_equals_ledger",
        "accounts_agree",
    }
    assert all(check.blocking and check.description for check in checks.values())


def test_nothing_is_there_that_was_not_asked_for(project):
    free = ProjectConfig.model_validate(
        {
            **project.model_dump(),
            "objective": {"losses": {"simpo": 1.0}, "reference": "none"},
            "data": {"held_out_share": 0},
        }
    )
    assert GRAPH.keys() - specs(free).keys() == {"reference_scores", "preference_eval"}


def test_loads_without_torch(tmp_path):
    (tmp_path / "pairledger.toml").write_text(TEXT)
    code = (
        "import sys; from pipeline.definitions import defs; found = defs(); "
        "found.get_repository_def().load_all_definitions(); "
        "print(len(found.resolve_all_asset_specs()), 'torch' in sys.modules, 'transformers' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["9", "False", "False"]


def test_a_wrong_configuration_is_one_sentence_of_the_code_location(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PAIRLEDGER_CONFIG", raising=False)
    (tmp_path / "pairledger.toml").write_text('[sources.a]\nfiles = ["x"]\n')
    with pytest.raises(ConfigError) as caught:
        defs()
    assert str(caught.value) == "sources.a.day = None; give the day at which it lands as YYYY-MM-DD"
    assert caught.value.__cause__ is None
