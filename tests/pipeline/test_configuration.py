"""Where the project's configuration comes from, and that the instance files agree with each other."""

import tomllib
from pathlib import Path

import pytest
import yaml
from dagster._core.instance.config import dagster_instance_config

from assets.launch import KILL_SECONDS, LocalLauncher
from pipeline.resources import find_project, resources
from training.errors import ConfigError

ROOT = Path(__file__).parents[2]
TEXT = """
store = "mine"
[sources.once]
files = ["pairs.jsonl"]
day = "2026-11-04"
"""


@pytest.fixture(autouse=True)
def place(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PAIRLEDGER_CONFIG", raising=False)
    monkeypatch.delenv("PAIRLEDGER_STORE", raising=False)


def test_the_working_directory_then_the_variable(tmp_path, monkeypatch):
    (tmp_path / "pairledger.toml").write_text(TEXT)
    assert find_project().store == str(tmp_path / "mine")
    other = tmp_path / "other" / "named.toml"
    other.parent.mkdir()
    other.write_text(TEXT.replace("mine", "theirs"))
    monkeypatch.setenv("PAIRLEDGER_CONFIG", str(other))
    assert find_project().store == str(tmp_path / "other" / "theirs")
    assert find_project().sources["once"].files == (str(tmp_path / "other" / "pairs.jsonl"),)
    monkeypatch.setenv("PAIRLEDGER_STORE", "elsewhere")
    assert find_project().store == str(tmp_path / "elsewhere")


def test_a_wrong_configuration_is_one_sentence(tmp_path, monkeypatch):
    monkeypatch.setenv("PAIRLEDGER_CONFIG", str(tmp_path / "none.toml"))
    with pytest.raises(ConfigError, match=r"none\.toml: there is no such configuration file"):
        find_project()
    (tmp_path / "pairledger.toml").write_text('[sources.a]\nfiels = ["x"]\n')
    monkeypatch.delenv("PAIRLEDGER_CONFIG")
    with pytest.raises(ConfigError, match=r"unknown key sources\.a\.fiels; did you mean files") as caught:
        find_project()
    assert "\n" not in str(caught.value)


def test_resources_hold_the_configured_devices(tmp_path):
    (tmp_path / "pairledger.toml").write_text(TEXT + '[devices]\nkind = "cpu"\n')
    made = resources(find_project())
    assert made["accelerator"].model_dump() == {
        "kind": "cpu",
        "count": 1,
        "dp_replicate": 1,
        "dp_shard": 1,
        "cp": 1,
        "ulysses": 1,
    }
    assert made["store"].root == made["ledger"].root == str(tmp_path / "mine")


def test_one_name_for_the_code_location():
    tool = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]
    (entry,) = yaml.safe_load((ROOT / "workspace.yaml").read_text())["load_from"]
    names = {
        entry["python_module"]["location_name"],
        tool["dagster"]["code_location_name"],
        tool["dg"]["project"]["code_location_name"],
    }
    modules = {
        entry["python_module"]["module_name"],
        tool["dagster"]["module_name"],
        tool["dg"]["project"]["code_location_target_module"],
    }
    assert (names, modules) == ({"pairledger"}, {"pipeline.definitions"})


def test_the_instance_frees_pools_sends_nothing_and_waits_for_a_stop():
    config, _ = dagster_instance_config(str(ROOT))
    assert config["telemetry"] == {"enabled": False}
    monitoring = config["run_monitoring"]
    assert monitoring["enabled"] and monitoring["free_slots_after_run_end_seconds"] > 0
    assert monitoring["cancel_timeout_seconds"] > LocalLauncher().term_grace_s + KILL_SECONDS
    assert config["concurrency"]["pools"] == {"granularity": "op", "default_limit": 1}
