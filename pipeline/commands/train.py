"""`pairledger train`: a run without Dagster."""

import argparse
import signal
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from pipeline.console import emit, facts, progress

if TYPE_CHECKING:
    from training.config import RunConfig
    from training.ledger.record import StepRecord

HELP = "train from a RUN.toml, or continue where it stopped; no Dagster"
ABOUT = """Train one run, or continue it from its newest checkpoint; a finished run is left as it is. Ctrl-C or SIGTERM
ends it after the current step, with a checkpoint. Where devices.processes is more than 1, the processes are started
here, and the first one's lines are printed, its result last as JSON. A fork is a run of its own: it starts from a
checkpoint's weights as its base model, with a fresh optimizer, plan position and ledger."""
EXAMPLE = """  pairledger train --config RUN.toml
  pairledger train --config RUN.toml --store /data/pairledger --json"""

ENDING = (signal.SIGTERM, signal.SIGINT)


def arguments(parser: argparse.ArgumentParser) -> None:
    """The command's arguments."""
    parser.add_argument("--config", required=True, metavar="RUN.toml", help="the run (docs/configuration.md)")
    parser.add_argument(
        "--store",
        metavar="DIR",
        help="folder that holds runs (default: PAIRLEDGER_STORE, else pairledger.toml's, else ./store)",
    )
    parser.add_argument(
        "--resume",
        default="auto",
        metavar="auto|CKPT|never",
        help="auto: the newest checkpoint that is whole (default); never: refuse to go on; or a step_N folder",
    )
    parser.add_argument("--fork", metavar="CKPT", help="start another run from the weights of this step_N folder")
    parser.add_argument("--json", action="store_true", help="print one JSON object for machines")


def run(arguments: argparse.Namespace) -> int:
    """Train; 128 + n where signal n ended it before the last step."""
    from training.config import load_run, store_root

    path, store = arguments.config, store_root(arguments.store)
    config = load_run(path)
    if arguments.fork:
        path = forked(config, Path(arguments.fork), store)
        config = load_run(path)
    if config.devices.processes > 1:
        from training import ranks

        return ranks.main(["--config", str(path), "--store", str(store), "--resume", arguments.resume])
    from training.run import run_training  # after the configuration: torch takes seconds

    trained = 0
    with signals() as caught, progress("training", "pairs", quiet=arguments.json) as show:

        def after(record: "StepRecord", total: int) -> None:
            nonlocal trained
            trained += len(record.pairs)
            show(trained, round(trained * total / record.step))

        result = run_training(config, store, resume=arguments.resume, progress=after, stop=lambda: bool(caught))
    found = {
        "run_id": result.run_id,
        "run_dir": str(result.run_dir),
        "attempt": result.attempt,
        "steps": result.steps,
        "finished": result.finished,
        "export": str(result.export) if result.export else None,
        **result.metrics,
    }
    (emit if arguments.json else facts)(found)
    return 128 + caught[0] if caught and not result.finished else 0


def forked(config: "RunConfig", checkpoint: Path, store: Path) -> Path:
    """A RUN.toml like this one, whose base model is what a checkpoint holds; both lie in the store, made once."""
    from training.config import dump
    from training.convert import export_checkpoint

    step = checkpoint.resolve()
    base = store / "forks" / f"{step.parents[1].name}-{step.name}"
    if not base.exists():
        export_checkpoint(checkpoint, base, dtype="fp32")
    model = config.model.model_copy(update={"path": str(base.resolve())})
    path = base.with_suffix(".toml")
    path.write_text(dump(config.model_copy(update={"model": model})), encoding="utf-8")
    return path


@contextmanager
def signals() -> Generator[list[int]]:
    """Catch SIGTERM and SIGINT in a list, so that a step is not cut in two."""
    caught: list[int] = []
    before = {number: signal.signal(number, lambda n, _: caught.append(n)) for number in ENDING}
    try:
        yield caught
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
