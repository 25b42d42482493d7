"""One load: the files that are new or have changed become rows.

A file is known by the digest of what was loaded of it (table `loaded`), so loading again reads nothing twice, and a
ledger that has grown is read from where it ended. Each file is one transaction with its row in `loaded`: whatever kills
the process, rows and memory of them agree. Of two lines for one step in an attempt's ledger the later one stands. A
file that cannot be read as declared is refused by name and leaves what was loaded of it before; it keeps no other file
out.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import duckdb
import pyarrow as pa
from blake3 import blake3

from training.errors import LedgerError
from training.ledger.catalog import MANIFEST, dataset_tables, read_manifest
from training.ledger.database import transaction
from training.ledger.facts import ATTEMPT, PREDICTED, RUN, AttemptFacts, RunFacts, read_facts
from training.ledger.lines import BLOCK, line_numbers, read_blocks
from training.ledger.rows import attempt_table, predicted_table, run_tables, step_tables
from training.ledger.validation import VALIDATION, validation_table
from training.ledger.writer import STEPS, CutLine

OF_STEP = ("step", "step_source", "step_pair")
OF_DATASET = ("dataset", "source", "shard", "pair", "quarantine")
SOURCES = """
insert into source
select $dataset, source, $fingerprint, count(*) filter (let_in), count(*) filter (not let_in)
from (
    select source, true as let_in from pair where dataset = $dataset
    union all
    select source, false from quarantine where dataset = $dataset
)
group by source
"""


@dataclass(kw_only=True)
class LoadReport:
    """What one load did; `refused` and `missing` are sentences, one a file."""

    snapshot: Path = Path()
    files: int = 0
    """Files that were read anew, in whole or from where they ended."""
    rows: int = 0
    cut: list[str] = field(default_factory=list[str])
    """Ledgers whose last line was cut by a killed process, with the line."""
    repeated: list[str] = field(default_factory=list[str])
    """Steps that an attempt's ledger holds more than once; the last line stands."""
    missing: list[str] = field(default_factory=list[str])
    """Datasets that a run used and that are not where it found them."""
    refused: list[str] = field(default_factory=list[str])
    set_aside: Path | None = None
    """Where a damaged database was moved before it was built again."""


@dataclass(frozen=True, slots=True)
class Loader:
    """A load in progress: the store's root, the writer's connection, and the report that it fills in."""

    root: Path
    connection: duckdb.DuckDBPyConnection
    report: LoadReport

    def run(self, run_dir: Path) -> None:
        """Load a run's facts, prediction, attempts and ledgers."""
        run_id = run_dir.name
        with self._refusing(), self._changed(run_dir / RUN) as changed:
            if changed:
                facts = read_facts(run_dir / RUN, RunFacts)
                _same(run_dir / RUN, "run_id", facts.run_id, run_id)
                self._replace(run_tables(facts).items(), ("run", "run_dataset"), {"run_id": run_id})
        if (run_dir / PREDICTED).exists():
            with self._refusing(), self._changed(run_dir / PREDICTED) as changed:
                if changed:
                    rows = predicted_table(run_dir / PREDICTED, run_id)
                    self._replace([("predicted", rows)], ("predicted",), {"run_id": run_id})
        for folder in sorted((run_dir / "attempts").glob("[0-9]*")):
            if folder.name.isdigit():
                self._attempt(folder, {"run_id": run_id, "attempt": int(folder.name)})

    def datasets(self) -> None:
        """Load the store's datasets, and those outside it that a run used; each version once, wherever it lies.

        A version that is nowhere any more keeps its rows, so that runs that used it can be traced, until a rebuild.
        """
        found = {path.parent for path in (self.root / "datasets").glob(f"*/*/*/{MANIFEST}")}
        for run_id, path in self._rows("select run_id, path from run_dataset order by all"):
            if (self.root / path / MANIFEST).exists():
                found.add(self.root / path)
            else:
                self.report.missing.append(f"run {run_id} used {self.root / path}, where there is no dataset now")
        seen: set[str] = set()
        for folder in sorted(found, key=lambda path: (Path(self._name(path)).is_absolute(), path)):
            with self._refusing():
                prepared, named = read_manifest(folder), self._name(folder)
                if prepared.fingerprint in seen:
                    continue
                seen.add(prepared.fingerprint)
                key = {"dataset": prepared.fingerprint}
                moved = self._rows(
                    "select path from dataset where dataset = $dataset and path <> $path", key | {"path": named}
                )
                with self._changed(folder / MANIFEST, anew=bool(moved)) as changed:
                    if changed:
                        self._replace(dataset_tables(prepared, named), OF_DATASET, key)
                        self._execute(SOURCES, key | {"fingerprint": prepared.manifest["inputs"].get("source")})
        self._execute(
            "delete from loaded where path like '%/manifest.json' "
            "and path not in (select path || '/manifest.json' from dataset)"
        )

    def _attempt(self, folder: Path, key: Mapping[str, Any]) -> None:
        with self._refusing(), self._changed(folder / ATTEMPT) as changed:
            if changed:
                rows = attempt_table(read_facts(folder / ATTEMPT, AttemptFacts), **key)
                self._replace([("attempt", rows)], ("attempt",), key)
        if (folder / VALIDATION).exists():
            with self._refusing(), self._changed(folder / VALIDATION) as changed:
                if changed:
                    rows = validation_table(folder / VALIDATION, **key)
                    self._replace([("validation", rows)], ("validation",), key)
        if (folder / STEPS).exists():
            with self._refusing():
                self._ledger(folder / STEPS, key)

    def _ledger(self, path: Path, key: Mapping[str, Any]) -> None:
        name, cut = self._name(path), None
        known = self._rows("select bytes, digest, lines, cut_line from loaded where path = $path", {"path": name})
        size, beginning, count, cut_line = known[0] if known else (0, None, 0, None)
        with path.open("rb") as file, transaction(self.connection):
            digest = _hashed(file, size)
            if goes_on := digest.hexdigest() == beginning:
                file.seek(size)
            else:
                self._delete(OF_STEP, key)
                size, count, digest = file.seek(0), 0, blake3()
            start = size
            for block in read_blocks(file, path, count + 1):
                if block.lines is None:
                    cut = CutLine(number=block.first, size=len(block.data))
                    self.report.cut.append(f"{path}:{cut.number}: the last line was cut after {cut.size} bytes")
                    break
                self._steps(path, block.first, block.lines, key)
                count += len(block.lines)
                size += len(block.data)
                digest.update(block.data)
            if goes_on and size == start and cut_line == (cut and cut.number):
                return
            self._remember(name, size, digest.hexdigest(), lines=count, cut=cut)
        self.report.files += 1

    def _steps(self, path: Path, first: int, lines: pa.Table, key: Mapping[str, Any]) -> None:
        """Insert lines `first` and on (from 1) of a ledger; a step's last line stands."""
        for name, value in key.items():
            for place, found in enumerate(lines[name].to_pylist(), first):
                _same(f"{path}:{place}", name, found, value)
        places = line_numbers(lines["step"].to_pylist())
        for step, (_, *again) in places.items():
            self.report.repeated += [f"{path}:{first + place}: step {step} again; this line stands" for place in again]
        before = self._rows(
            "select step from step where run_id = $run_id and attempt = $attempt and step in (select unnest($steps))",
            {**key, "steps": list(places)},
        )
        for (step,) in before:
            self.report.repeated.append(f"{path}: step {step} again; its last line stands")
            self._delete(OF_STEP, {**key, "step": step})
        if len(places) < len(lines):
            lines = lines.take([at[-1] for at in places.values()])
        self._insert(step_tables(lines).items())

    @contextmanager
    def _refusing(self) -> Generator[None]:
        """Turn what is wrong with one file into a sentence of the report."""
        try:
            yield
        except LedgerError as error:
            self.report.refused.append(str(error))
        except OSError as error:
            self.report.refused.append(f"{error.filename}: cannot be read: {error.strerror}")

    @contextmanager
    def _changed(self, path: Path, *, anew: bool = False) -> Generator[bool]:
        """Say whether a whole file is new or other than it was; what is done about it is one transaction."""
        data, name = path.read_bytes(), self._name(path)
        digest = blake3(data).hexdigest()
        known = self._rows(
            "select 1 from loaded where path = $path and digest = $digest", {"path": name, "digest": digest}
        )
        if known and not anew:
            yield False
            return
        with transaction(self.connection):
            yield True
            self._remember(name, len(data), digest)
        self.report.files += 1

    def _remember(
        self, name: str, size: int, digest: str, *, lines: int | None = None, cut: CutLine | None = None
    ) -> None:
        self._execute("delete from loaded where path = $path", {"path": name})
        values = {"path": name, "bytes": size, "digest": digest, "lines": lines, "cut": cut and cut.number}
        self._execute("insert into loaded values ($path, $bytes, $digest, $lines, $cut)", values)

    def _replace(self, tables: Iterable[tuple[str, pa.Table]], owned: Iterable[str], key: Mapping[str, Any]) -> None:
        self._delete(owned, key)
        self._insert(tables)

    def _delete(self, tables: Iterable[str], key: Mapping[str, Any]) -> None:
        for table in tables:
            self._execute(f"delete from {table} where " + " and ".join(f"{name} = ${name}" for name in key), key)

    def _insert(self, tables: Iterable[tuple[str, pa.Table]]) -> None:
        for name, rows in tables:
            if len(rows):
                self.connection.register("incoming", rows)
                self.connection.execute(f"insert into {name} by name select * from incoming")
                self.connection.unregister("incoming")
                self.report.rows += len(rows)

    def _rows(self, sql: str, values: Mapping[str, Any] | None = None) -> list[tuple[Any, ...]]:
        return self.connection.execute(sql, dict(values or {})).fetchall()

    def _execute(self, sql: str, values: Mapping[str, Any] | None = None) -> None:
        self.connection.execute(sql, dict(values or {}))

    def _name(self, path: Path) -> str:
        """A path as the database keeps it: relative to the store where it lies inside it."""
        whole, root = path.resolve(), self.root.resolve()
        return whole.relative_to(root).as_posix() if whole.is_relative_to(root) else str(whole)


def _same(place: Path | str, name: str, found: Any, wanted: Any) -> None:
    if found != wanted:
        raise LedgerError(
            f"{place}: {name} is {found!r}, but its folder says {wanted!r}; a ledger stays in its own folder"
        )


def _hashed(file: BinaryIO, size: int) -> blake3:
    """The hash of a file's first `size` bytes."""
    digest = blake3()
    while size > 0 and (piece := file.read(min(size, BLOCK))):
        digest.update(piece)
        size -= len(piece)
    return digest
