"""Sensors, off until someone switches them on."""

import dagster as dg

from assets.store import ShardStore
from pipeline.backlog import backlog
from training.config import ProjectConfig


def sensors(project: ProjectConfig) -> list[dg.SensorDefinition]:
    """New drops are prepared; a ledger that grew is loaded."""

    @dg.sensor(job_name="prepare_preferences", minimum_interval_seconds=300)
    def prepare_new_drops(context: dg.SensorEvaluationContext) -> list[dg.RunRequest] | dg.SkipReason:
        """Asks once for each drop that appeared and is not prepared, a few at a time."""
        keys = backlog(context.instance, project, "preference_shards")
        return [dg.RunRequest(partition_key=key, run_key=key) for key in keys] or dg.SkipReason("no new drop")

    @dg.sensor(job_name="account_for_tokens", minimum_interval_seconds=60)
    def load_growing_ledgers(context: dg.SensorEvaluationContext, store: ShardStore) -> dg.SensorResult | dg.SkipReason:
        """Loads the ledgers, also of runs that are still going, when one of them has grown."""
        size = str(sum(file.stat().st_size for file in store.path.glob("runs/*/attempts/*/steps.jsonl")))
        if size == (context.cursor or "0"):
            return dg.SkipReason("no ledger has grown")
        return dg.SensorResult(run_requests=[dg.RunRequest(run_key=size)], cursor=size)

    return [prepare_new_drops, load_growing_ledgers]
