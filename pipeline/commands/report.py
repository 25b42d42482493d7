"""`pairledger report`: a run's account as one page."""

import argparse

from pipeline.console import console, escaped

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
    from training.ledger.store import load, run_named

    root = store_root(arguments.store)
    load(root)
    run_id = run_named(root, arguments.run_id)
    path = write_report(root, run_id, arguments.out)
    console().print(f"{escaped(run_id)}  [dim]{escaped(str(path))}[/dim]")
    return 0
