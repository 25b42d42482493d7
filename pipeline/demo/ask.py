"""What the base model and the trained one answer to the questions that training never saw.

    python -m pipeline.demo.ask RUN.toml STORE EXPORT

prints one JSON object: by question its source, its text, the right answer and both models' greedy answers, and the
share of questions for which the base model finds the right answer likelier than the wrong one.
"""

import json
import sys
from pathlib import Path
from typing import Any

from training.attempt import references
from training.config import load_run
from training.evaluate import answers
from training.parallel.device import pick
from training.scores import open_policy
from training.setup import Prepared, prepare

LONGEST = 12
"""Tokens of an answer; a right one has six."""


def ask(config: Path, store: Path, export: Path) -> dict[str, Any]:
    """Both models' answers to the held-out questions of a run."""
    run = load_run(config)
    planned, device = prepare(run, store), pick(run.devices.kind)
    chosen, rejected = references(planned, open_policy(run.model, device), device)[:, planned.plan.held_out]
    asked = questions(planned, store / "demo")
    prompts = [question["prompt"] for question in asked]
    before, after = (
        answers(model, prompts, device=device, max_new_tokens=LONGEST) for model in (Path(run.model.path), export)
    )
    told = [{**one, "before": b, "after": a} for one, b, a in zip(asked, before, after, strict=True)]
    return {"preferred_before": float((chosen > rejected).mean()), "questions": told}


def questions(planned: Prepared, folder: Path) -> list[dict[str, str]]:
    """The held-out pairs' questions and right answers, read at the lines that the shards say they came from."""
    table, found = planned.plan.table, []
    for i in planned.plan.held_out:
        dataset = planned.datasets[table.datasets[table.dataset[i]]]
        pair = dataset.take(int(table.shard[i]), int(table.row[i]))
        name, _, line = pair.locator.rpartition(":")
        row = json.loads((folder / name).read_text(encoding="utf-8").splitlines()[int(line) - 1])
        found.append({"source": pair.source, "prompt": row["prompt"], "right": row["chosen"]})
    return found


if __name__ == "__main__":
    print(json.dumps(ask(*map(Path, sys.argv[1:4]))))
