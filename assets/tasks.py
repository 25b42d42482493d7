"""What the launcher runs besides training: `python -m assets.tasks TASK`, with its input and its report over Pipes.

This is the only module here whose imports bring torch; the code location never imports it.
"""

import logging
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from dagster_pipes import open_dagster_pipes

from training.attempt import references
from training.config import ModelConfig, RunConfig
from training.data.fingerprint import model_fingerprint
from training.data.shards import open_dataset
from training.errors import PairLedgerError
from training.evaluate import held_out_logps, judge_held_out
from training.parallel.device import pick
from training.reference import compute_reference, open_reference, place_of
from training.scores import open_policy
from training.setup import prepare


def reference(run: RunConfig, store: Path) -> dict[str, Any]:
    """Score the one dataset of `run` with its model, or find that this was done."""
    dataset = open_dataset(Path(run.data.datasets[0]))
    model, precision = model_fingerprint(Path(run.model.path)), run.model.dtype
    folder = place_of(store, dataset.fingerprint, model, precision)
    found = open_reference(folder, dataset=dataset.fingerprint, model=model, precision=precision)
    scores = found or compute_reference(
        open_policy(run.model, device := pick(run.devices.kind)),
        dataset,
        folder,
        model=model,
        precision=precision,
        layout=run.plan.layout,
        device=device,
        room=run.plan.pack_tokens,
    )
    return {
        "path": str(folder),
        "reused": found is not None,
        "dataset": dataset.fingerprint,
        "model": model,
        "precision": precision,
        "pairs": len(scores.key),
        "chosen_logp_mean": float(scores.chosen.mean()),
        "rejected_logp_mean": float(scores.rejected.mean()),
    }


def evaluate(run: RunConfig, store: Path, *, model: str) -> dict[str, Any]:
    """Judge an exported model on the pairs that its run's plan held out; `""` stands for all sources."""
    device, planned = pick(run.devices.kind), prepare(run, store)
    logps = held_out_logps(
        open_policy(ModelConfig(path=model), device),
        planned.plan,
        planned.datasets,
        layout=run.plan.layout,
        precision=run.model.dtype,
        device=device,
        room=planned.pack_tokens,
    )
    reference = references(planned, open_policy(run.model, device), device)
    judged = judge_held_out(logps, planned.plan, reference, run.objective)
    return {"judged": {source: asdict(found) for source, found in judged.items()}}


TASKS: Mapping[str, Callable[..., dict[str, Any]]] = {"reference": reference, "evaluate": evaluate}


def main(task: str) -> int:
    """Run one task with the extras `run`, `store` and its own; gives the exit code."""
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stdout)
    with open_dagster_pipes() as pipes:
        given = dict(pipes.extras)
        try:
            run, store = RunConfig.model_validate(given.pop("run")), Path(given.pop("store"))
            pipes.report_custom_message(TASKS[task](run, store, **given))
        except PairLedgerError as error:
            print(f"error: {error}", file=sys.stderr)
            return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
