"""Jobs, named as sentences: what a person asks for. Their partitions are those of their assets."""

import dagster as dg

JOBS = [
    dg.define_asset_job(
        "prepare_preferences",
        dg.AssetSelection.assets("preference_pairs", "preference_shards"),
        description="Pairs and token shards of one source's drop. Takes no accelerator, waits for no training.",
    ),
    dg.define_asset_job(
        "score_references",
        dg.AssetSelection.assets("reference_scores"),
        description="The reference's log-probabilities of one drop, on the accelerator.",
    ),
    dg.define_asset_job(
        "train_policy",
        dg.AssetSelection.assets("step_plan", "dpo_run", "aligned_model", "preference_eval"),
        description="Plan, train, verify and evaluate the policy of one week, on the accelerator.",
    ),
    dg.define_asset_job(
        "account_for_tokens",
        dg.AssetSelection.assets("token_ledger", "fill_report"),
        description="Load every run's ledger and every manifest into DuckDB; report fill and loss density.",
    ),
]
