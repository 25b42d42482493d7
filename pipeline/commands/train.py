"""`pairledger train`: a run without Dagster."""

import argparse
import signal
from typing import TYPE_CHECKING

from pipeline.console import emit, facts, progress

if TYPE_CHECKING:
    from training.ledger.record import StepRecord

HELP = "train from a RUN.toml, or continue where it stopped; no Dagster"
ABOUT = """Train one run, or continue it from its newest checkpoint; a finished run is left as it is. Ctrl-C or SIGTERM
ends it after the current step, with a checkpoint."""
EXAMPLE = """  pairledger train --config RUN.toml
  pairledger train --config RUN.toml --store /data/pairledger --json"""


def arguments(parser: argparse.ArgumentParser) -> None:
    """The command's arguments."""
    parser.add_argument(
        "--config", required=True, metavar="RUN.toml", help="the run's configuration (docs/configuration.md)"
    )
    parser.add_argument(
        "--store",
        metavar="DIR",
        help="folder that holds runs (default: PAIRLEDGER_STORE, else pairledger.toml's, else ./store)",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object for machines")


def run(arguments: argparse.Namespace) -> int:
    """Train; 128 + n where signal n ended it before the last step."""
    from training.config import load_run, store_root

    config = load_run(arguments.config)  # before torch is imported, which takes seconds
    from training.run import run_training

    caught: list[int] = []
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda n, _: caught.append(n))
    pairs = 0
    with progress("training", "pairs", quiet=arguments.json) as show:

        def after(record: "StepRecord", total: int) -> None:
            nonlocal pairs
            pairs += len(record.pairs)
            show(pairs, round(pairs / record.step * total) if record.step else None)

        result = run_training(config, store_root(arguments.store), progress=after, stop=lambda: bool(caught))
    found = {
        "run_id": result.run_id,
        "run_dir": str(result.run_dir),
        "attempt": result.attempt,
        "steps": result.steps,
        "finished": result.finished,
        "export": str(result.export) if result.export else None,
        **result.metrics,
    }
    if arguments.json:
        emit(found)
    else:
        facts(found)
    return 128 + caught[0] if caught and not result.finished else 0
