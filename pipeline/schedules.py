"""Schedules, off until someone switches them on."""

from datetime import UTC, timedelta

import dagster as dg

from assets.partitions import wanted
from pipeline.backlog import backlog
from training.config import ProjectConfig

Requests = list[dg.RunRequest] | dg.SkipReason


def schedules(project: ProjectConfig) -> list[dg.ScheduleDefinition]:
    """Nightly preparation and scoring of what is missing, weekly training; times are UTC."""

    @dg.schedule(job_name="prepare_preferences", cron_schedule="0 2 * * *", execution_timezone="UTC")
    def prepare_every_night(context: dg.ScheduleEvaluationContext) -> Requests:
        """Asks for drops that exist and are not prepared, a few at a time."""
        keys = backlog(context.instance, project, "preference_shards")
        return _tonight(context, keys) or dg.SkipReason("every drop is prepared")

    @dg.schedule(job_name="score_references", cron_schedule="0 4 * * *", execution_timezone="UTC")
    def score_every_night(context: dg.ScheduleEvaluationContext) -> Requests:
        """Asks for prepared drops that have no reference scores, a few at a time."""
        keys = backlog(context.instance, project, "reference_scores", after="preference_shards")
        return _tonight(context, keys) or dg.SkipReason("every prepared drop has its reference scores")

    @dg.schedule(job_name="train_policy", cron_schedule="0 6 * * 1", execution_timezone="UTC")
    def train_every_week(context: dg.ScheduleEvaluationContext) -> dg.RunRequest | dg.SkipReason:
        """Asks on Monday for the week that has ended."""
        today = context.scheduled_execution_time.astimezone(UTC).date()
        week = (today - timedelta(days=today.weekday() + 7)).isoformat()
        if not wanted(project, week):
            return dg.SkipReason(f"no source has a drop up to the end of week {week}")
        return dg.RunRequest(partition_key=week, run_key=week)

    scores = [score_every_night] if project.objective.reads_reference else []
    return [prepare_every_night, *scores, train_every_week]


def _tonight(context: dg.ScheduleEvaluationContext, keys: list[dg.MultiPartitionKey]) -> list[dg.RunRequest]:
    """A request for each partition, once a night; one that failed is asked for again the next night."""
    night = context.scheduled_execution_time.astimezone(UTC).date()
    return [dg.RunRequest(partition_key=key, run_key=f"{key}@{night}") for key in keys]
