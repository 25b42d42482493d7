"""`pairledger ledger`: the account of every token, asked in SQL."""

import argparse

from pipeline.console import console, emit, escaped, table

HELP = "ask the token ledger in SQL, rebuild it, or say where it lies"
ABOUT = "The account of every token, in DuckDB. Tables and views: docs/sql.md."
EXAMPLE = """  pairledger ledger query "SELECT run_id, pack_fill, loss_density FROM run_summary"
  pairledger ledger query "SELECT source, loss_density FROM source_density" --json
  duckdb -readonly "$(pairledger ledger path)\""""

ACTIONS = {
    "query": "load what runs and preparation have written since, then answer one SQL query",
    "rebuild": "make the database anew from ledgers and manifests",
    "path": "load what was written since, and print the read-only DuckDB file that any other tool may open",
}


def arguments(parser: argparse.ArgumentParser) -> None:
    """The command's arguments."""
    actions = parser.add_subparsers(dest="action", metavar="query|rebuild|path", required=True)
    for name, what in ACTIONS.items():
        action = actions.add_parser(name, help=what, description=what)
        if name == "query":
            action.add_argument("sql", metavar="SQL", help="the query, in quotes")
        action.add_argument("--store", metavar="DIR", help="folder that holds runs (default: as for train)")
        if name != "path":
            action.add_argument("--json", action="store_true", help="print JSON for machines")


def run(arguments: argparse.Namespace) -> int:
    """Do what was asked."""
    from training.config import store_root
    from training.ledger import store

    root = store_root(arguments.store)
    if arguments.action == "rebuild":
        report = store.rebuild(root)
        found = {"path": str(report.snapshot), "files": report.files, "rows": report.rows}
        if arguments.json:
            emit(found)
        else:
            console().print(f"{report.files:,} files, {report.rows:,} rows  [dim]{escaped(str(report.snapshot))}[/dim]")
        return 0
    store.load(root)
    if arguments.action == "path":
        print(store.snapshot(root))
        return 0
    columns, rows = store.query(root, arguments.sql)
    if arguments.json:
        emit([dict(zip(columns, row, strict=True)) for row in rows])
    else:
        table(columns, rows)
        console(stderr=True).print(f"[dim]{len(rows):,} rows[/dim]")
    return 0
