"""The code location: every asset, check, job, schedule, sensor and resource of the configured project.

It loads without torch, which takes seconds: what needs it runs in processes of its own.
"""

import dagster as dg

from assets import ledger, preferences, training
from assets.checks import checks
from assets.partitions import calendar
from pipeline.jobs import jobs
from pipeline.resources import find_project, resources
from pipeline.schedules import schedules
from pipeline.sensors import sensors
from training.config import ProjectConfig


def build(project: ProjectConfig) -> dg.Definitions:
    """The definitions of a project.

    Raises:
        ConfigError: its sources cannot be partitions.
    """
    plan = calendar(project)
    return dg.Definitions(
        assets=[*preferences.assets(plan, project), *training.assets(plan, project), *ledger.assets()],
        asset_checks=checks(),
        jobs=jobs(project),
        schedules=schedules(project),
        sensors=sensors(project),
        resources=resources(project),
        # a step is short, or waits for processes of its own: a worker a step would be mostly imports
        executor=dg.in_process_executor,
    )


@dg.definitions
def defs() -> dg.Definitions:
    """What Dagster loads."""
    return build(find_project())
