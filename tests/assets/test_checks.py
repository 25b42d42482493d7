"""Each check passes on what is whole and fails on a planted fault, naming it."""

import shutil
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace

import dagster as dg
import pyarrow as pa
import pytest

from assets import checks
from assets.store import ShardStore, current
from pipeline.definitions import build
from tests.assets.small import DROPS, write_project
from tests.training.ledger.records import record
from training.data.manifest import write_manifest
from training.data.shards import open_dataset
from training.geometry import Counters
from training.ledger.facts import ATTEMPT, PREDICTED, AttemptFacts, write_facts
from training.ledger.record import COUNTERS
from training.ledger.writer import STEPS, LedgerWriter

WORDS = DROPS[2]
WEEK = "2026-11-09"


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A project with one prepared drop, and the instance that knows it."""
    project = write_project(tmp_path_factory.mktemp("project"))
    with dg.instance_for_test() as instance:
        job = build(project).resolve_job_def("prepare_preferences")
        assert job.execute_in_process(partition_key=WORDS, instance=instance).success
        yield project, instance


@pytest.fixture
def drop(whole, tmp_path) -> SimpleNamespace:
    """A copy of the store to spoil."""
    project, instance = whole
    shutil.copytree(project.store, tmp_path / "store")
    store = ShardStore(root=str(tmp_path / "store"))
    path = store.path / current(instance, "preference_shards", [WORDS])[WORDS].path
    context = SimpleNamespace(instance=instance, partition_key=WORDS)
    return SimpleNamespace(project=project, store=store, path=path, context=context)


def test_a_flipped_byte(drop):
    assert checks.shards_match_manifest(drop.context, drop.store).passed
    shard = drop.path / "shard-00000.arrow"
    data = bytearray(shard.read_bytes())
    data[len(data) // 2] ^= 1
    shard.write_bytes(data)
    found = checks.shards_match_manifest(drop.context, drop.store)
    assert not found.passed and "shard-00000.arrow: its digest is" in (found.description or "")


def test_another_dataset_in_its_place(drop):
    manifest = open_dataset(drop.path).manifest
    write_manifest(drop.path, replace(manifest, fingerprint="ds1:other"))
    found = checks.shards_match_manifest(drop.context, drop.store)
    assert not found.passed and f"materialised {manifest.fingerprint}, found ds1:other" == found.description


def test_tokens_that_are_not_there(drop):
    found = checks.tokens_match_manifest(drop.context, drop.store)
    manifest = open_dataset(drop.path).manifest
    assert found.passed and found.metadata["tokens/chosen"].value == manifest.tokens["chosen"] > 0
    write_manifest(drop.path, replace(manifest, tokens={**manifest.tokens, "chosen": manifest.tokens["chosen"] + 1}))
    assert not checks.tokens_match_manifest(drop.context, drop.store).passed


def test_targets_outside_their_document(drop):
    assert checks.targets_stay_inside(drop.context, drop.store).passed
    shard = drop.path / "shard-00000.arrow"
    table = pa.ipc.open_file(pa.memory_map(str(shard))).read_all()
    rows = table.to_pylist()
    rows[1]["chosen_mask"] = [True] * (len(rows[1]["chosen_ids"]) + 1)
    rows[3]["rejected_mask"] = [False] * len(rows[3]["rejected_ids"])
    rows[4]["rejected_ids"] = []
    rows[5]["prompt_ids"] = []
    del table
    with pa.OSFile(str(shard), "wb") as sink, pa.ipc.new_file(sink, (spoilt := _table(rows)).schema) as writer:
        writer.write_table(spoilt, max_chunksize=4)  # a fault is found behind the first batch as well
    found = checks.targets_stay_inside(drop.context, drop.store)
    assert not found.passed and found.metadata["pairs_with_misplaced_targets"].value == 4
    assert set((found.description or "").split("; ")) == {
        "shard 0, row 1: chosen has a mask of another length",
        "shard 0, row 3: rejected has no supervised token",
        "shard 0, row 4: rejected has no supervised token",
        "shard 0, row 5: no prompt",
    }


def _table(rows: list[dict]) -> pa.Table:
    from training.data.shards import SCHEMA

    return pa.Table.from_pylist(rows, SCHEMA)


@pytest.mark.parametrize(("limit", "passes"), [(2 / 14, True), (0.14, False)])
def test_the_share_of_the_quarantine(drop, limit, passes):
    limits = drop.project.limits.model_copy(update={"max_quarantine": limit})
    project = drop.project.model_copy(update={"limits": limits})
    found = checks.quarantine_share(drop.context, drop.store, project)
    assert found.passed is passes
    assert (found.description or "").startswith("2 of 14 rows quarantined: 14.3%, at most ")


def counted(step: int, **values: int) -> Counters:
    return Counters(**{"window_tokens": 400, "source_tokens": 100 + step, "loss_tokens": 50, "pairs": 4, **values})


def run_context(tmp_path: Path, instance: dg.DagsterInstance, attempts: list[tuple[int, int, list]]) -> SimpleNamespace:
    """A run of attempts (from_step, pack_tokens, records) whose prediction is `counted` for steps 1 to 3."""
    run_dir = tmp_path / "runs" / "run-1"
    for number, (from_step, pack_tokens, records) in enumerate(attempts, 1):
        folder = run_dir / "attempts" / f"{number:04}"
        folder.mkdir(parents=True)
        facts = AttemptFacts(from_step=from_step, started_at=datetime.now(UTC), device="cpu", pack_tokens=pack_tokens)
        write_facts(folder / ATTEMPT, facts)
        writer = LedgerWriter(folder / STEPS)
        for one in records:
            writer.append(replace(one, attempt=number))
        writer.close()
    predicted = [{name: getattr(counted(step), name) for name in COUNTERS} for step in (1, 2, 3)]
    columns = {name: pa.array([row[name] for row in predicted], pa.int64()) for name in COUNTERS}
    steps = {"step": pa.array([1, 2, 3], pa.int64()), "epoch": pa.array([0, 0, 0], pa.int64())}
    table = pa.table({**steps, **columns, "cost_max_over_mean": pa.array([1.0] * 3)})
    with pa.OSFile(str(run_dir / PREDICTED), "wb") as sink, pa.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table)
    event = dg.AssetMaterialization("dpo_run", partition=WEEK, metadata={"path": "runs/run-1"})
    instance.report_runless_asset_event(event)
    return SimpleNamespace(instance=instance, partition_key=WEEK)


GOOD = [record(step, counters=counted(step)) for step in (1, 2, 3)]


@pytest.mark.parametrize(
    ("attempts", "differences"),
    [
        ([(1, 400, GOOD)], []),
        ([(1, 400, GOOD[:2])], ["step 3 is planned, and not in the ledger"]),
        (
            [(1, 400, [*GOOD[:2], record(3, counters=counted(3, loss_tokens=51))])],
            ["step 3: loss_tokens predicted 50, counted 51"],
        ),
        (
            [(1, 400, [GOOD[0], record(2, unknown_reason="rank 1 was silent"), GOOD[2]])],
            ["step 2: rank 1 was silent"],
        ),
        ([(1, 400, [*GOOD, record(4, counters=counted(4))])], ["step 4: not planned"]),
        # an earlier attempt with other packs has other room, and the same tokens
        ([(1, 200, [record(1, counters=counted(1, window_tokens=200))]), (2, 400, GOOD[1:])], []),
        (
            [(1, 200, [record(1, counters=counted(1, window_tokens=200, pairs=5))]), (2, 400, GOOD[1:])],
            ["step 1: pairs predicted 4, counted 5"],
        ),
        # what a later attempt voided is no step
        ([(1, 400, [GOOD[0], record(2, counters=counted(2, pairs=9))]), (2, 400, GOOD[1:])], []),
    ],
    ids=["equal", "missing", "differs", "unknown", "unplanned", "other packs", "other tokens", "voided"],
)
def test_plan_against_ledger(tmp_path, attempts, differences):
    with dg.DagsterInstance.ephemeral() as instance:
        context = run_context(tmp_path, instance, attempts)
        found = checks.plan_equals_ledger(context, ShardStore(root=str(tmp_path)))
    assert found.passed is (not differences)
    assert found.description == ("; ".join(differences) or "every counter of every step is as predicted")
