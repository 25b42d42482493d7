"""Blocking checks: what depends on an asset does not run after one of them failed.

Each looks at the files themselves, not at what the asset said of them: the shards are hashed and counted again, a run's
ledger is held against its prediction step by step. Costs one reading of the shards at memory speed.
"""

from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path

import dagster as dg
import numpy as np
import pyarrow as pa

from assets.progress import recorded
from assets.reporting import markdown_table, portable
from assets.store import ShardStore, TokenLedger, made
from training.config import ProjectConfig
from training.data.shards import PARTS, Dataset, lengths, open_dataset, true_values
from training.errors import PairLedgerError
from training.ledger.facts import ATTEMPT, PREDICTED, AttemptFacts, read_facts
from training.ledger.reconcile import reconcile
from training.ledger.rows import predicted_table
from training.ledger.store import runs

ROOM = {"window_tokens", "physical_tokens", "packs", "empty_packs"}
"""Counters that depend on the topology."""
SHOWN = 20
"""Differences that a failed check spells out."""


def shards_match_manifest(context: dg.AssetCheckExecutionContext, store: ShardStore) -> dg.AssetCheckResult:
    """Every shard hashes to what its manifest says, and the manifest is the one that was materialised."""
    one = made(context.instance, "preference_shards", context.partition_key)
    try:
        dataset = open_dataset(store.path / one.path)
    except PairLedgerError as error:
        return dg.AssetCheckResult(passed=False, description=str(error))
    return dg.AssetCheckResult(
        passed=dataset.fingerprint == one.fingerprint,
        description=f"materialised {one.fingerprint}, found {dataset.fingerprint}",
        metadata={"shards": len(dataset.manifest.shards)},
    )


def tokens_match_manifest(context: dg.AssetCheckExecutionContext, store: ShardStore) -> dg.AssetCheckResult:
    """Tokens counted in the shards are those the manifest says."""
    dataset = _dataset(context, store)
    shards = _shards(dataset)
    counted = {part: sum(int(_by_row(table[f"{part}_ids"], lengths).sum()) for table in shards) for part in PARTS}
    stated = {part: dataset.manifest.tokens[part] for part in PARTS}
    return dg.AssetCheckResult(
        passed=counted == stated,
        description=f"counted {counted}, the manifest says {stated}",
        metadata=portable({f"tokens/{part}": tokens for part, tokens in counted.items()}),
    )


def targets_stay_inside(context: dg.AssetCheckExecutionContext, store: ShardStore) -> dg.AssetCheckResult:
    """A mask is as long as its completion, and each side of each pair has a prompt and a supervised token."""
    wrong = list(_misplaced(_dataset(context, store)))
    return dg.AssetCheckResult(
        passed=not wrong,
        description="; ".join(wrong[:SHOWN]) or "every target lies in its completion",
        metadata={"pairs_with_misplaced_targets": len(wrong)},
    )


def quarantine_share(
    context: dg.AssetCheckExecutionContext, store: ShardStore, project: dg.ResourceParam[ProjectConfig]
) -> dg.AssetCheckResult:
    """At most `limits.max_quarantine` of the rows were not let in."""
    counts = _dataset(context, store).manifest.counts
    share, limit = counts["quarantined"] / counts["rows"], project.limits.max_quarantine
    return dg.AssetCheckResult(
        passed=share <= limit,
        description=f"{counts['quarantined']} of {counts['rows']} rows quarantined: {share:.1%}, at most {limit:.1%}",
        metadata=portable({"share": share, "limit": limit}),
    )


def plan_equals_ledger(context: dg.AssetCheckExecutionContext, store: ShardStore) -> dg.AssetCheckResult:
    """Each step's counters are those that were predicted before the run, and none is unknown or missing."""
    run_dir = store.path / made(context.instance, "dpo_run", context.partition_key).path
    differences = _differences(run_dir)
    return dg.AssetCheckResult(
        passed=not differences,
        description="; ".join(differences[:SHOWN]) or "every counter of every step is as predicted",
        metadata={"differences": len(differences)},
    )


def accounts_agree(ledger: TokenLedger) -> dg.AssetCheckResult:
    """Plan, ledger and manifests of every loaded run agree in the database, down to the pair."""
    known = runs(ledger.root)
    rows = [(run_id, str(difference)) for run_id in known for difference in reconcile(ledger.root, run_id)]
    return dg.AssetCheckResult(
        passed=not rows,
        description=f"{len(rows)} differences in {len(known)} runs",
        metadata={"differences": markdown_table(["run", "difference"], rows[:SHOWN])} if rows else {},
    )


def _dataset(context: dg.AssetCheckExecutionContext, store: ShardStore) -> Dataset:
    return open_dataset(
        store.path / made(context.instance, "preference_shards", context.partition_key).path, verify=False
    )


def _shards(dataset: Dataset) -> list[pa.Table]:
    """The shards as they lie on disk, whatever their schema says."""
    paths = [dataset.path / shard.file for shard in dataset.manifest.shards]
    return [pa.ipc.open_file(pa.memory_map(str(path))).read_all() for path in paths]


def _misplaced(dataset: Dataset) -> Iterator[str]:
    for number, table in enumerate(_shards(dataset)):
        faults = {"no prompt": _by_row(table["prompt_ids"], lengths) == 0}
        for side in PARTS[1:]:
            length, mask = _by_row(table[f"{side}_ids"], lengths), table[f"{side}_mask"]
            masked, supervised = _by_row(mask, lengths), _by_row(mask, true_values)
            faults[f"{side} has a mask of another length"] = (masked >= 0) & (masked != length)
            faults[f"{side} has no supervised token"] = np.where(masked < 0, length, supervised) == 0
        for what, rows in faults.items():
            yield from (f"shard {number}, row {row}: {what}" for row in np.flatnonzero(rows))


def _by_row(column: pa.ChunkedArray, of: Callable[[pa.ListArray], np.ndarray]) -> np.ndarray:
    return np.concatenate([np.empty(0, np.int64), *map(of, column.chunks)])


def _differences(run_dir: Path) -> list[str]:
    """Where the steps that stand are not as predicted; room is compared on the topology of the prediction alone."""
    predicted = {row["step"]: row for row in predicted_table(run_dir / PREDICTED, run_dir.name).to_pylist()}
    steps = {record.step: record for record in recorded(run_dir)}
    meshes = {int(path.parent.name): _mesh(path) for path in run_dir.glob(f"attempts/*/{ATTEMPT}")}
    found = [f"step {step} is planned, and not in the ledger" for step in sorted(predicted.keys() - steps.keys())]
    for step, record in steps.items():
        planned, counters = predicted.get(step), record.counters
        if planned is None or counters is None:
            found.append(f"step {step}: " + (record.unknown_reason or "counters unknown" if planned else "not planned"))
            continue
        left_out = set() if meshes[record.attempt] == meshes[max(meshes)] else ROOM
        for name, counted in asdict(counters).items():
            if name not in left_out and counted != planned[name]:
                found.append(f"step {step}: {name} predicted {planned[name]}, counted {counted}")
    return found


def _mesh(path: Path) -> tuple[int, ...]:
    facts = read_facts(path, AttemptFacts)
    return facts.dp_replicate, facts.dp_shard, facts.cp, facts.ulysses, facts.pack_tokens


def checks() -> list[dg.AssetChecksDefinition]:
    """Every check with its asset; each looks at the partition that was materialised."""
    of = {
        "preference_shards": (shards_match_manifest, tokens_match_manifest, targets_stay_inside, quarantine_share),
        "dpo_run": (plan_equals_ledger,),
        "token_ledger": (accounts_agree,),
    }
    return [dg.asset_check(asset=asset, blocking=True)(check) for asset, named in of.items() for check in named]
