"""`pairledger ledger`: the account of every token, loaded, asked, held against the plan, rebuilt."""

import argparse
from dataclasses import asdict
from pathlib import Path

from pipeline.console import console, emit, escaped, table
from training.errors import LedgerError

HELP = "ask the token ledger in SQL, hold it against the plan, rebuild it, or say where it lies"
ABOUT = "The account of every token, in DuckDB. Tables and views: docs/sql.md."
EXAMPLE = """  pairledger ledger query "SELECT run_id, pack_fill, loss_density FROM run_summary"
  pairledger ledger query "SELECT source, loss_density FROM source_density" --json
  pairledger ledger reconcile run-5f1c
  duckdb -readonly "$(pairledger ledger path)\""""

ACTIONS = {
    "query": "load what runs and preparation have written since, then answer one SQL query",
    "reconcile": "load, then hold plan, ledger and manifests against one another; fails where they differ",
    "load": "load what was written since, publish it, and say what was found",
    "rebuild": "make the database anew from ledgers and manifests",
    "path": "load what was written since, and print the read-only DuckDB file that any other tool may open",
}


def arguments(parser: argparse.ArgumentParser) -> None:
    """The command's arguments."""
    actions = parser.add_subparsers(dest="action", metavar="|".join(ACTIONS), required=True)
    for name, what in ACTIONS.items():
        action = actions.add_parser(name, help=what, description=what)
        if name == "query":
            action.add_argument("sql", metavar="SQL", help="the query, in quotes")
        if name == "reconcile":
            action.add_argument("run_id", metavar="RUN", nargs="?", help="id of a run, or its beginning; else all runs")
        action.add_argument("--store", metavar="DIR", help="folder that holds runs (default: as for train)")
        if name != "path":
            action.add_argument("--json", action="store_true", help="print JSON for machines")


def run(arguments: argparse.Namespace) -> int:
    """Do what was asked; where a file could not be loaded, of what could be, and then fail with its name."""
    from training.config import store_root
    from training.ledger import store

    root = store_root(arguments.store)
    if arguments.action in ("load", "rebuild"):
        _loaded(root, anew=arguments.action == "rebuild", json=arguments.json)
        return 0
    refused: LedgerError | None = None
    try:
        store.load(root)
    except LedgerError as error:
        refused = error
    if arguments.action == "query":
        _answered(root, arguments.sql, json=arguments.json)
    elif arguments.action == "reconcile":
        _reconciled(root, arguments.run_id, json=arguments.json)
    else:
        print(store.snapshot(root))
    if refused:
        raise refused
    return 0


def _loaded(root: Path, *, anew: bool, json: bool) -> None:
    from training.ledger.store import load, rebuild

    report = rebuild(root) if anew else load(root)
    said = {"cut": report.cut, "repeated": report.repeated, "missing": report.missing}
    if json:
        emit({"path": str(report.snapshot), "files": report.files, "rows": report.rows, **said})
        return
    console().print(f"{report.files:,} files, {report.rows:,} rows  [dim]{escaped(str(report.snapshot))}[/dim]")
    for sentence in (sentence for sentences in said.values() for sentence in sentences):
        console(stderr=True).print(escaped(sentence))


def _answered(root: Path, sql: str, *, json: bool) -> None:
    from training.ledger.store import query

    columns, rows = query(root, sql)
    if json:
        emit([dict(zip(columns, row, strict=True)) for row in rows])
    else:
        table(columns, rows)
        console(stderr=True).print(f"[dim]{len(rows):,} rows[/dim]")


def _reconciled(root: Path, name: str | None, *, json: bool) -> None:
    from training.ledger.reconcile import differ, reconcile
    from training.ledger.store import run_named, runs

    asked = [run_named(root, name)] if name else runs(root)
    if not asked:
        raise LedgerError(f"{root} has no run to reconcile; train first")
    found = {run_id: reconcile(root, run_id) for run_id in asked}
    if json:
        emit({run_id: [asdict(difference) for difference in differences] for run_id, differences in found.items()})
    for run_id, differences in found.items():
        if not differences and not json:
            console().print(f"{escaped(run_id)}: plan, ledger and manifests agree, to the token")
    wrong = [differ(run_id, differences) for run_id, differences in found.items() if differences]
    if wrong:
        raise LedgerError("\n".join(wrong))
