"""How preparation and training are partitioned, and which drops a week must have.

Preparation is partitioned by source × drop: the sources are those of the configuration, a drop is a day. Training is
partitioned by week (from Monday, the current week included) and reads the drops up to its end. Dagster maps a week to
its own days and does not refuse when one is missing, so `wanted` says what must be there and `assets.training` asks.

A source with `{drop}` in its files has a drop on each day for which such files exist. Any other source has one drop, at
its stated `day`.
"""

import fnmatch
import re
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta

import dagster as dg
import fsspec

from training.config import ProjectConfig, SourceConfig
from training.errors import ConfigError

PLACE = "{drop}"
DAY = r"\d{4}-\d{2}-\d{2}"
SAFE = frozenset("abcdefghijklmnopqrstuvwxyz0123456789-_")


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Drop:
    """What one source brought on one day (YYYY-MM-DD): a partition of preparation."""

    day: str
    source: str

    @property
    def key(self) -> dg.MultiPartitionKey:
        """The partition key; Dagster orders the dimensions by name."""
        return dg.MultiPartitionKey({"drop": self.day, "source": self.source})

    @staticmethod
    def of(key: str) -> "Drop":
        """Back from a partition key. The day comes first and holds no bar, so a source may."""
        day, source = key.split("|", 1)
        return Drop(day=day, source=source)

    def files(self, config: SourceConfig) -> tuple[str, ...]:
        """Where this drop's files are.

        Raises:
            ConfigError: the source has no drop on this day.
        """
        if not dated(config) and config.day != self.day:
            raise ConfigError(
                f"source {self.source!r} has no dated drops: it lands at {config.day}, not at {self.day}; "
                f"materialise {self.source} × {config.day}"
            )
        return tuple(path.replace(PLACE, self.day) for path in config.files)


@dataclass(frozen=True, slots=True, kw_only=True)
class Calendar:
    """The partitions of a project."""

    drops: dg.MultiPartitionsDefinition
    weeks: dg.WeeklyPartitionsDefinition


def calendar(project: ProjectConfig) -> Calendar:
    """Partitions from the configured sources; the first day is the earliest a source names.

    Raises:
        ConfigError: there is no source, one has no `day`, or a name that cannot be a partition.
    """
    if not project.sources:
        raise ConfigError("no [sources.NAME] is configured; name at least one, with its files and its day")
    for name, source in project.sources.items():
        if _date(source.day) is None:
            what = "the first day of its dated drops" if dated(source) else "the day at which it lands"
            raise ConfigError(f"sources.{name}.day = {source.day!r}; give {what} as YYYY-MM-DD")
        if "|" in name or "..." in name or not name.isprintable():
            raise ConfigError(f"source name {name!r} has a bar, three dots or a control character; name it otherwise")
    first = min(day for source in project.sources.values() if (day := _date(source.day)))
    monday = first - timedelta(days=first.weekday())
    return Calendar(
        drops=dg.MultiPartitionsDefinition(
            {
                "drop": dg.DailyPartitionsDefinition(first.isoformat(), end_offset=1),
                "source": dg.StaticPartitionsDefinition(list(project.sources)),
            }
        ),
        weeks=dg.WeeklyPartitionsDefinition(monday.isoformat(), day_offset=1, end_offset=1),
    )


def folder_name(key: str) -> str:
    """A key as one folder's name: percent-encoded, `urllib.parse.unquote` reads it back, distinct keys never meet.

    Dots and capitals are encoded too: `..` stays below the root; `A` and `a` differ on a file system without case.
    """
    return "".join(chr(byte) if chr(byte) in SAFE else f"%{byte:02X}" for byte in key.encode())


def dated(source: SourceConfig) -> bool:
    """Whether the source's files name a drop."""
    return any(PLACE in path for path in source.files)


def existing(project: ProjectConfig) -> list[Drop]:
    """Every drop whose files are there, in order of day and source. Costs one listing per path that names a drop."""
    found: set[Drop] = set()
    for name, source in project.sources.items():
        days = _listed_days(source) if dated(source) else {source.day}
        found.update(Drop(day=day, source=name) for day in days if day and source.day and day >= source.day)
    return sorted(found)


def wanted(project: ProjectConfig, week: str) -> list[Drop]:
    """The existing drops a week trains on: those up to its end, of the last `weekly.weeks` weeks where that is set."""
    monday = date.fromisoformat(week)
    after = (monday + timedelta(weeks=1)).isoformat()
    first = (monday - timedelta(weeks=project.weekly.weeks - 1)).isoformat() if project.weekly.weeks else ""
    return [drop for drop in existing(project) if first <= drop.day < after]


def _listed_days(source: SourceConfig) -> set[str]:
    days: set[str] = set()
    for path in source.files:
        if PLACE not in path:
            continue
        filesystem, pattern = fsspec.url_to_fs(path)
        named = fnmatch.translate(pattern).replace(re.escape(PLACE), f"(?P<day>{DAY})", 1)
        reader = re.compile(named.replace(re.escape(PLACE), "(?P=day)"))
        matches = [reader.match(str(found)) for found in filesystem.glob(pattern.replace(PLACE, "????-??-??"))]
        days.update(match["day"] for match in matches if match and _has_begun(match["day"]))
    return days


def _has_begun(day: str) -> bool:
    """Whether a day's partition exists: a calendar day that has begun (UTC, as Dagster's partitions are)."""
    found = _date(day)
    return found is not None and found <= datetime.now(UTC).date()


def _date(day: str | None) -> date | None:
    try:
        return datetime.strptime(day or "", "%Y-%m-%d").date()
    except ValueError:
        return None
