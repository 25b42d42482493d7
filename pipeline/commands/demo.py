"""`pairledger demo`: preference files to a trained model and its account, through Dagster."""

import argparse
import os
import signal
import sys
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path

from pipeline.console import console, escaped

HELP = "preference files → a trained model → its token ledger, in under three minutes"
ABOUT = """Generate two preference sources about which of two numbers is larger, prepare them, train a small model, ask
it questions that it never saw, before and after, and answer two questions from the token ledger. Everything runs as
Dagster jobs and lies below ./store; `pairledger ui` shows the runs. Killed at any moment, it continues when started
again."""
EXAMPLE = """  pairledger demo
  pairledger demo --seed 1"""


def arguments(parser: argparse.ArgumentParser) -> None:
    """The command's arguments."""
    parser.add_argument(
        "--seed", type=int, default=0, metavar="S", help="another task, base model and order (default: 0)"
    )


def run(arguments: argparse.Namespace) -> int:
    """Play the demonstration; 128 + n where signal n ended it."""
    from pipeline.commands.ui import dagster_home

    os.environ.setdefault("OMP_NUM_THREADS", "1")  # a model this small loses time to a second thread
    dagster_home()
    began = time.monotonic()
    from pipeline.demo.play import play  # imports Dagster, which takes a second

    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with received_signals() as last:
        try:
            play(arguments.seed)
        except KeyboardInterrupt:
            return 128 + last()
    shown = console()
    place, command = escaped(str(Path("store").resolve())), escaped(sys.argv[0])
    shown.print(f"[dim]{time.monotonic() - began:.0f} s in all · everything lies in {place}[/dim]")
    shown.print("[dim]make ui (or pairledger ui) shows the runs · ask more:[/dim]")
    shown.print(f'[dim]{command} ledger query "SELECT * FROM run_summary"[/dim]')
    return 0


@contextmanager
def received_signals() -> Generator[Callable[[], int]]:
    """Know which signal came last although Dagster puts its own handlers in place while a job runs."""
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    before = signal.set_wakeup_fd(writer)
    try:
        yield lambda: os.read(reader, 4096)[-1]
    finally:
        signal.set_wakeup_fd(before)
        os.close(reader)
        os.close(writer)
