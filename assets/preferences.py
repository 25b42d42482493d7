"""From preference files to shards and reference scores, by source and drop.

Preparation takes no accelerator and waits for no training. Reference scores are computed for each drop, so that weeks
whose windows overlap share them.
"""

from functools import partial
from pathlib import Path
from typing import Any

import dagster as dg

from assets import pictures
from assets.launch import Accelerator, Launcher, Program
from assets.partitions import Calendar, Drop
from assets.reporting import column_schema, markdown_table, plainly, portable
from assets.store import ShardStore, made, source_spec
from training.config import ProjectConfig
from training.data import recipe, stored
from training.data.fingerprint import fp
from training.data.prepare import prepare
from training.data.shards import PARTS, SCHEMA, Dataset
from training.data.sources import open_source

OWNERS = ["team:pairledger"]


@plainly()
def preference_pairs(
    context: dg.AssetExecutionContext, project: dg.ResourceParam[ProjectConfig], store: ShardStore
) -> dg.MaterializeResult:
    """Canonical pairs of one source's drop, before any tokenizer, and the rows that were not let in with the reason."""
    drop = Drop.of(context.partition_key)
    source = open_source(source_spec(drop, project.sources[drop.source]))
    pairs = stored.store_pairs(source, store.drop("pairs", drop))
    return dg.MaterializeResult(
        data_version=dg.DataVersion(pairs.fingerprint),
        metadata=portable(
            {
                "path": store.name(pairs.path),
                "dagster/row_count": pairs.counts["pairs"],
                "rows": pairs.counts["rows"],
                "quarantined": pairs.counts["quarantined"],
                "reasons": _reasons(pairs.counts["reasons"]),
                "source": dg.MetadataValue.json(pairs.source),
                "dagster/column_schema": column_schema(stored.SCHEMA),
            }
        ),
    )


@plainly()
def preference_shards(
    context: dg.AssetExecutionContext, project: dg.ResourceParam[ProjectConfig], store: ShardStore
) -> dg.MaterializeResult:
    """The drop's pairs as token ids in Arrow shards, with masks, provenance and a quarantine under one manifest."""
    drop = Drop.of(context.partition_key)
    pairs = made(context.instance, "preference_pairs", context.partition_key)
    template = project.tokenizer.template
    report = prepare(
        stored.open_pairs(store.path / pairs.path),
        Path(project.tokenizer.path),
        store.drop("datasets", drop),
        template=Path(template) if template else None,
        date=project.tokenizer.date,
        limits=project.limits,
        by_fingerprint=True,
    )
    dataset = report.dataset
    return dg.MaterializeResult(
        data_version=dg.DataVersion(dataset.fingerprint),
        metadata=portable({"path": store.name(dataset.path), "reused": report.reused, **_account(dataset)}),
    )


@plainly()
def reference_scores(
    context: dg.AssetExecutionContext,
    project: dg.ResourceParam[ProjectConfig],
    store: ShardStore,
    launcher: dg.ResourceParam[Launcher],
    accelerator: Accelerator,
) -> dg.MaterializeResult:
    """The reference's log-probability of each side of the drop's pairs, read by every run over them."""
    shards = made(context.instance, "preference_shards", context.partition_key)
    run = project.run((str(store.path / shards.path),))
    run = run.model_copy(update={"devices": accelerator.devices(run.devices)})
    extras = {"run": run.model_dump(mode="json"), "store": store.root}
    report = launcher.run(context, Program(module="assets.tasks", args=("reference",), extras=extras))
    return dg.MaterializeResult(
        data_version=dg.DataVersion(fp("ref", report["dataset"], report["model"], report["precision"])),
        metadata=portable({**report, "path": store.name(Path(report["path"])), "dagster/row_count": report["pairs"]}),
    )


def _account(dataset: Dataset) -> dict[str, Any]:
    """What a dataset's manifest says of it, and its lengths as a picture."""
    manifest, columns = dataset.manifest, dataset.columns()
    return {
        "dagster/row_count": manifest.counts["pairs"],
        "rows": manifest.counts["rows"],
        "quarantined": manifest.counts["quarantined"],
        "duplicates": manifest.counts["duplicates"],
        "reasons": _reasons(manifest.counts["reasons"]),
        "shards": len(manifest.shards),
        "bytes": sum(shard.bytes for shard in manifest.shards),
        **{f"tokens/{name}": count for name, count in manifest.tokens.items()},
        **{f"fingerprint/{name}": value for name, value in manifest.inputs.items()},
        "rendering": manifest.rendering,
        "lengths": pictures.lengths({part: getattr(columns, part) for part in PARTS}),
        "dagster/column_schema": column_schema(SCHEMA),
    }


def _reasons(counts: dict[str, int]) -> dg.MarkdownMetadataValue | None:
    return markdown_table(["reason", "rows"], sorted(counts.items(), key=lambda one: -one[1])) if counts else None


def assets(calendar: Calendar, project: ProjectConfig) -> list[dg.AssetsDefinition]:
    """The group `preferences`; there are reference scores where the objective reads them."""
    daily = partial(dg.asset, group_name="preferences", partitions_def=calendar.drops, owners=OWNERS)
    scores = daily(deps=["preference_shards"], kinds={"pytorch"}, pool="accelerator", code_version="1")(
        reference_scores
    )
    return [
        daily(kinds={"arrow"}, code_version=str(stored.FORMAT))(preference_pairs),
        daily(deps=["preference_pairs"], kinds={"arrow"}, code_version=str(recipe.VERSION))(preference_shards),
        *([scores] if project.objective.reads_reference else []),
    ]
