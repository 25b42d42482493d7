"""What is still to be done: drops that exist and lack an asset, a few at a time, oldest first."""

import dagster as dg

from assets.partitions import existing
from assets.store import current
from training.config import ProjectConfig

AT_ONCE = 8
"""Partitions asked for at once, so that a backlog does not fill the queue."""


def backlog(
    instance: dg.DagsterInstance, project: ProjectConfig, asset: str, *, after: str | None = None
) -> list[dg.MultiPartitionKey]:
    """Partitions that lack `asset` and, where given, have the asset it is made from."""
    keys = [drop.key for drop in existing(project)]
    if after:
        ready = current(instance, after, keys)
        keys = [key for key in keys if key in ready]
    there = current(instance, asset, keys)
    return [key for key in keys if key not in there][:AT_ONCE]
