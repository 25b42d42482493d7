"""Reference scores: computed once, read back exactly, refused where they are not the run's own."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from tests.training.memory import MemoryDataset, larger_number, write_model
from training.config import DataConfig, ModelConfig, PlanConfig
from training.data.plan import make_plan
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
    compute_reference(policy, DATASET, folder, model="mdl1:a", precision="fp32", layout="shared", device=CPU)
    return folder


def test_scores_are_read_back_as_they_were_computed(policy: Policy, folder: Path) -> None:
    seen: list[tuple[int, int]] = []
    again = compute_reference(
        policy,
        DATASET,
        folder,
        model="mdl1:a",
        precision="fp32",
        layout="shared",
        device=CPU,
        progress=lambda done, of: seen.append((done, of)),
    )
    found = open_reference(folder, **KEY)
    assert found is not None and seen[-1] == (20, 20)
    np.testing.assert_array_equal(found.chosen, again.chosen)
    np.testing.assert_array_equal(found.rejected, again.rejected)
    np.testing.assert_array_equal(found.key, np.arange(20))
    assert (found.chosen < -1).all() and np.ptp(found.chosen) > 0.1
    assert not list(folder.parent.glob(".*"))  # nothing half-written stays


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
