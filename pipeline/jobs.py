"""Jobs, named as sentences: what a person asks for. Their partitions are those of their assets."""

import dagster as dg
from dagster._core.definitions.unresolved_asset_job_definition import UnresolvedAssetJobDefinition

from training.config import ProjectConfig


def jobs(project: ProjectConfig) -> list[UnresolvedAssetJobDefinition]:
    """Every job; there is nothing to score for an objective that reads no reference."""
    prepare = dg.define_asset_job(
        "prepare_preferences",
        dg.AssetSelection.assets("preference_pairs", "preference_shards"),
        description="Pairs and token shards of one source's drop. Takes no accelerator, waits for no training.",
    )
    score = dg.define_asset_job(
        "score_references",
        dg.AssetSelection.assets("reference_scores"),
        description="The reference's log-probabilities of one drop, on the accelerator.",
    )
    train = dg.define_asset_job(
        "train_policy",
        dg.AssetSelection.groups("training"),
        description="Plan, train, verify and evaluate the policy of one week, on the accelerator.",
    )
    account = dg.define_asset_job(
        "account_for_tokens",
        dg.AssetSelection.groups("ledger"),
        description="Load every run's ledger and every manifest into DuckDB; report fill and loss density.",
    )
    return [prepare, *([score] if project.objective.reads_reference else []), train, account]
