"""`pairledger report`: a run's account as one page."""

import argparse

from pipeline.console import console, escaped
from training.errors import LedgerError

HELP = "a run's account as one HTML page"
ABOUT = """Write what a run's tokens came to, as one page without anything to load: fill and loss density by step and
source, loss, rewards, throughput, and whether plan, ledger and manifests agree."""
EXAMPLE = """  pairledger report run-5f1c8a1b2c3d --out report.html"""


def arguments(parser: argparse.ArgumentParser) -> None:
    """The command's arguments."""
    parser.add_argument("run_id", metavar="RUN", help="id of a run, or its beginning")
    parser.add_argument("--out", required=True, metavar="FILE.html", help="page to write")
    parser.add_argument("--store", metavar="DIR", help="folder that holds runs (default: as for train)")


def run(arguments: argparse.Namespace) -> int:
    """Load what is new and write the page."""
    from training.config import store_root
    from training.ledger.report import write_report
    from training.ledger.store import load, query

    root = store_root(arguments.store)
    load(root)
    _, rows = query(root, "select run_id from run order by created_at desc, run_id")
    known = [name for (name,) in rows]
    found = [name for name in known if name == arguments.run_id] or [n for n in known if n.startswith(arguments.run_id)]
    if len(found) != 1:
        choice = ", ".join((found or known)[:5]) or "none yet; train first"
        raise LedgerError(f"{root} has {len(found)} runs named {arguments.run_id}; there are: {choice}")
    path = write_report(root, found[0], arguments.out)
    console().print(f"{escaped(found[0])}  [dim]{escaped(str(path))}[/dim]")
    return 0
