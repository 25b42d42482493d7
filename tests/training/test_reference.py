"""Reference scores: computed once, read back exactly, refused where they are not the run's own."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from tests.training.memory import MemoryDataset, larger_number, write_model
from training.config import DataConfig, ModelConfig, PlanConfig
from training.data.plan import make_plan
from training.data.tokenize import TokenizedPair
from training.errors import DatasetError, IdentityError
from training.model import Policy
from training.parallel.device import pick
from training.reference import ReferenceScores, align, compute_reference, open_reference, place_of, score_pairs
from training.scores import open_policy

CPU = pick("cpu")
DATASET = MemoryDataset(tuple(larger_number(20)))
KEY = {"dataset": DATASET.fingerprint, "model": "mdl1:a", "precision": "fp32"}


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Policy:
    return open_policy(ModelConfig(path=str(write_model(tmp_path_factory.mktemp("reference") / "model"))), CPU)


@pytest.fixture
def folder(policy: Policy, tmp_path: Path) -> Path:
    folder = place_of(tmp_path, *KEY.values())
    compute(policy, DATASET, folder)
    return folder


def compute(policy: Policy, dataset: MemoryDataset, folder: Path, **more: Any) -> ReferenceScores:
    return compute_reference(
        policy, dataset, folder, model="mdl1:a", precision="fp32", layout="shared", device=CPU, **more
    )


def test_scores_are_read_back_as_they_were_computed(policy: Policy, tmp_path: Path) -> None:
    folder, seen = place_of(tmp_path, *KEY.values()), list[tuple[int, int]]()
    made = compute(policy, DATASET, folder, progress=lambda done, of: seen.append((done, of)))
    found = open_reference(folder, **KEY)
    assert found is not None and seen[-1] == (20, 20)
    np.testing.assert_array_equal(found.chosen, made.chosen)
    np.testing.assert_array_equal(found.rejected, made.rejected)
    np.testing.assert_array_equal(found.key, np.arange(20))
    assert (found.chosen < -1).all() and np.ptp(found.chosen) > 0.1
    assert [p.name for p in folder.parent.glob(".*")] == [f".{folder.name}.lock"]  # nothing half-written stays
    seen.clear()
    compute(policy, DATASET, folder, progress=lambda done, of: seen.append((done, of)))
    assert not seen  # it is there


class Sharded(MemoryDataset):
    """The same pairs in shards of seven, and a wish to be killed in the middle."""

    dies_at: int | None = None

    def take(self, shard: int, row: int) -> TokenizedPair:
        if self.dies_at == shard * 7 + row:
            raise KeyboardInterrupt
        return self.pairs[shard * 7 + row]

    def columns(self) -> Any:
        found = super().columns()
        found.shard, found.row = found.row // 7, found.row % 7
        return found


def test_a_killed_scoring_goes_on_after_its_last_shard(policy: Policy, tmp_path: Path) -> None:
    sharded, folder, whole = Sharded(DATASET.pairs), tmp_path / "r" / "scores", tmp_path / "r" / "whole"
    want = compute(policy, sharded, whole)
    object.__setattr__(sharded, "dies_at", 16)
    with pytest.raises(KeyboardInterrupt):
        compute(policy, sharded, folder)
    assert not folder.exists()
    partial = folder.parent / ".scores-partial"
    assert sorted(p.name for p in partial.glob("*.json")) == ["scores-00000.json", "scores-00001.json"]
    altered = partial / "scores-00000.arrow"
    altered.write_bytes(altered.read_bytes()[:-1] + b"x")
    object.__setattr__(sharded, "dies_at", None)
    seen: list[int] = []
    found = compute(policy, sharded, folder, progress=lambda done, of: seen.append(of))
    assert set(seen) == {7, 6}  # the altered shard and the last one; the second was kept
    np.testing.assert_array_equal(found.key, want.key)
    np.testing.assert_array_equal(found.chosen, want.chosen)
    assert not partial.exists() and len(list(folder.glob("*.arrow"))) == 3


def test_a_pair_scores_the_same_alone_and_in_company(policy: Policy, folder: Path) -> None:
    """case: ref-batch-dependence"""
    found = open_reference(folder, **KEY)
    assert found is not None
    settings = {"room": 4096, "layout": "concat", "precision": "fp32", "device": CPU}
    for i in (0, 7, 19):
        alone = score_pairs(policy, lambda _, i=i: DATASET.pairs[i], [40], **settings)
        np.testing.assert_allclose(alone[0], [found.chosen[i], found.rejected[i]], rtol=1e-5)


def test_no_scores_are_no_error_and_foreign_ones_are(folder: Path) -> None:
    """case: ref-values-ignored; vector 28"""
    assert open_reference(folder.parent / "elsewhere", **KEY) is None
    for name in KEY:
        with pytest.raises(IdentityError, match=f"{name} is .* needs 'other'") as caught:
            open_reference(folder, **{**KEY, name: "other"})
        assert str(folder) in str(caught.value) and caught.value.exit_code == 4


def test_an_altered_file_is_named(folder: Path) -> None:
    file = folder / "scores-00000.arrow"
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    with pytest.raises(DatasetError, match=r"scores-00000\.arrow"):
        open_reference(folder, **KEY)
    (folder / "manifest.json").write_text(json.dumps({})[:1], encoding="utf-8")
    with pytest.raises(DatasetError, match="not JSON"):
        open_reference(folder, **KEY)


def test_scores_find_their_pairs_in_a_plan_of_several_datasets() -> None:
    other = MemoryDataset(tuple(larger_number(5, seed=9)))
    table = make_plan([DATASET, other], DataConfig(duplicates="drop"), PlanConfig()).table

    def scores(dataset: MemoryDataset, offset: float) -> ReferenceScores:
        key = np.arange(len(dataset.pairs), dtype=np.int64)
        made = (offset + key).astype(np.float32)
        return ReferenceScores(
            dataset=dataset.fingerprint, model="m", precision="fp32", key=key, chosen=made, rejected=-made
        )

    known = {dataset.fingerprint: scores(dataset, base) for dataset, base in ((DATASET, 100.0), (other, 500.0))}
    aligned = align(table, known)
    base = np.where(table.dataset == table.datasets.index(other.fingerprint), 500.0, 100.0)
    np.testing.assert_array_equal(aligned[0], base + table.row)
    np.testing.assert_array_equal(aligned[1], -aligned[0])
    cut = replace(known[DATASET.fingerprint], key=np.arange(3), chosen=np.zeros(3), rejected=np.zeros(3))
    with pytest.raises(IdentityError, match="17 pairs have no reference score.*row 3"):
        align(make_plan([DATASET], DataConfig(), PlanConfig()).table, {DATASET.fingerprint: cut})


def test_columns_are_declared(folder: Path) -> None:
    with pa.memory_map(str(folder / "scores-00000.arrow")) as source:
        schema = pa.ipc.open_file(source).schema
    assert {name: str(schema.field(name).type) for name in schema.names} == {
        "shard": "int32",
        "row": "int32",
        "chosen_logp": "float",
        "rejected_logp": "float",
    }
