"""Which version is current is what Dagster's last materialization says."""

from pathlib import Path

import dagster as dg
import pytest

from assets.partitions import Drop
from assets.store import ShardStore, current, made, source_spec
from training.config import SourceConfig
from training.errors import ConfigError, DatasetError


def report(instance: dg.DagsterInstance, partition: str, version: str) -> None:
    instance.report_runless_asset_event(
        dg.AssetMaterialization(
            "shards", partition=partition, metadata={"path": f"at/{version}"}, tags={"dagster/data_version": version}
        )
    )


def test_the_last_materialization_of_each_partition_is_current():
    with dg.DagsterInstance.ephemeral() as instance:
        for partition, version in (("a", "ds1:1"), ("b", "ds1:2"), ("a", "ds1:3"), ("c", "ds1:4")):
            report(instance, partition, version)
        found = current(instance, "shards", ["a", "b", "x"])
        assert {key: (one.fingerprint, one.path) for key, one in found.items()} == {
            "a": ("ds1:3", "at/ds1:3"),
            "b": ("ds1:2", "at/ds1:2"),
        }
        assert current(instance, "other", ["a"]) == current(instance, "shards", []) == {}
        assert made(instance, "shards", "c").fingerprint == "ds1:4"
        with pytest.raises(DatasetError, match="shards has no partition x yet; materialise it first"):
            made(instance, "shards", "x")


def test_places(tmp_path):
    store = ShardStore(root=str(tmp_path))
    folder = store.drop("datasets", Drop(day="2026-11-16", source="org/Qwen2.5"))
    assert folder == tmp_path / "datasets" / "org%2F%51wen2%2E5" / "2026-11-16"
    assert store.name(folder / "x") == "datasets/org%2F%51wen2%2E5/2026-11-16/x"
    assert store.plan("plan1:ab") == tmp_path / "plans" / "plan1-ab"
    with pytest.raises(ValueError, match="is not in the subpath"):
        store.name(Path("/elsewhere"))


def test_a_source_is_read_as_configured():
    config = SourceConfig(files=("in/{drop}.jsonl",), day="2026-11-01", format="labelled", map={"chosen": "good"})
    spec = source_spec(Drop(day="2026-11-16", source="s"), config)
    assert (spec.name, spec.inputs, spec.format) == ("s", ("in/2026-11-16.jsonl",), "labelled")
    assert spec.mapping == {"chosen": "good"}
    with pytest.raises(ConfigError):
        source_spec(Drop(day="2026-11-16", source="s"), config.model_copy(update={"files": ("in.jsonl",)}))
