"""The demonstration, act by act, and what it prints.

The base model is made in a process of its own while Dagster prepares the sources: two cores, two things to do.
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager, nullcontext, suppress
from datetime import date, timedelta
from pathlib import Path
from typing import Any

import dagster as dg

from assets.partitions import existing
from pipeline.console import console, escaped, table
from pipeline.definitions import build
from pipeline.demo.runs import Stage, end_abandoned, metadata
from pipeline.demo.task import put, write_task
from pipeline.resources import DEMO
from training.config import ProjectConfig, load_project
from training.data.fingerprint import fp
from training.errors import TrainingError
from training.ledger.store import query

FILL = """\
SELECT step, pairs, packs, source_tokens, pack_fill, loss_density
FROM current_step JOIN step_rates USING (run_id, attempt, step, pairs)
WHERE run_id = ? AND (step = 1 OR step % {every} = 0)
ORDER BY step"""
DENSITY = """\
SELECT source, pairs, source_tokens, loss_tokens, loss_density, share_of_source_tokens
FROM source_density
WHERE run_id = ?
ORDER BY loss_density"""
BASE_INPUTS = ("undecided.jsonl", "tokenizer/tokenizer.json")
GRACE_SECONDS = "10"
SUBTITLE = "two preference sources, one small model, every token counted"
MEASURES = """\
preferred: before, likelier than the wrong one under the base model; after, reward accuracy against that model
given: the greedy answer is the right one, to the character"""
SHOWN = 3
"""Questions of each source whose answers are shown."""


def play(seed: int) -> None:
    """Every act in order.

    Raises:
        PairLedgerError: one of them failed; the message says which and where its output is.
    """
    project = configured(seed)
    store, folder = Path(project.store), Path(project.model.path).parent
    folder.mkdir(parents=True, exist_ok=True)
    console().print(f"[bold]Which number is larger?[/bold]  [dim]{SUBTITLE}[/dim]\n")
    with dg.DagsterInstance.get() as instance:
        end_abandoned(instance)
        stage = Stage(definitions=build(project), instance=instance, log=folder / "output.log")
        stage.log.write_text("", encoding="utf-8")
        with act("two sources of questions, a tokenizer"):
            write_task(folder, seed)
        drops = existing(project)
        with base_model(folder, seed, stage.log) as base_is_made:
            with act("pairs and token shards of both sources", stage):
                for drop in drops:
                    stage.run("prepare_preferences", drop.key)
            with act("a base model that is right half of the time"):
                base_is_made()
        with act("the base model's scores, as reference", stage):
            for drop in drops:
                stage.run("score_references", drop.key)
        with act("step plan, training, export, evaluation", stage):
            trained = stage.run("train_policy", week(drops[0].day))
        with act("every token into the ledger", stage):
            stage.run("account_for_tokens")
    run = metadata(trained, "dpo_run")
    with act("held-out questions, before and after"):
        told = ask(store, store / run["path"], stage.log)
    show_answers(told, metadata(trained, "preference_eval")["accuracy"])
    show_account(store, run["run_id"])


def configured(seed: int) -> ProjectConfig:
    """The demonstration's project in the working directory."""
    project = load_project(DEMO, base=Path.cwd())
    return project.model_copy(update={"plan": project.plan.model_copy(update={"seed": seed})})


def week(day: str) -> str:
    """The Monday of a day's week."""
    of = date.fromisoformat(day)
    return (of - timedelta(days=of.weekday())).isoformat()


@contextmanager
def act(what: str, stage: Stage | None = None) -> Generator[None]:
    """Show that something goes on, then a line that says how long it took and as which Dagster runs."""
    shown, began = console(), time.monotonic()
    first = len(stage.runs) if stage else 0
    with shown.status(what) if shown.is_terminal else nullcontext():
        yield
    runs = " · ".join(run[:8] for run in stage.runs[first:]) if stage else ""
    shown.print(f"  [green]✓[/green] {what:<44} [dim]{time.monotonic() - began:5.1f} s  {runs}[/dim]")


@contextmanager
def base_model(folder: Path, seed: int, log: Path) -> Generator[Callable[[], None]]:
    """Make the base model in processes of their own, unless it is there; call what this gives to wait for it.

    Raises:
        TrainingError: it could not be made.
    """
    receipt = folder / "base" / "made-from.json"
    made_from = fp("demo", seed, [(folder / name).read_text(encoding="utf-8") for name in BASE_INPUTS])
    if receipt.exists() and json.loads(receipt.read_text(encoding="utf-8")) == made_from:
        yield lambda: None
        return
    with log.open("a", encoding="utf-8") as output:
        guard = [sys.executable, "-m", "assets.guard", str(os.getpid()), GRACE_SECONDS]
        maker = [sys.executable, "-m", "pipeline.demo.base", str(folder), str(seed)]
        group = subprocess.Popen([*guard, *maker], stdout=output, stderr=output, start_new_session=True)

    def finish() -> None:
        if code := group.wait():
            raise TrainingError(f"the base model could not be made (exit code {code}); output: {log}")
        put(receipt, json.dumps(made_from))

    try:
        yield finish
    finally:
        with suppress(ProcessLookupError):
            os.killpg(group.pid, signal.SIGKILL)
        group.wait()


def ask(store: Path, run_dir: Path, log: Path) -> dict[str, Any]:
    """Both models' answers, from a process of its own.

    Raises:
        TrainingError: it failed.
    """
    config = max(run_dir.glob("attempts/*"), key=lambda folder: int(folder.name)) / "config.toml"
    command = [sys.executable, "-m", "pipeline.demo.ask", str(config), str(store), str(run_dir / "export")]
    with log.open("a", encoding="utf-8") as errors:
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=errors, text=True)
    if done.returncode:
        raise TrainingError(f"the models could not be asked (exit code {done.returncode}); output: {log}")
    return json.loads(done.stdout.splitlines()[-1])


def show_answers(told: dict[str, Any], accuracy: float) -> None:
    """How often the right answer is preferred, how often it is given, and a few answers."""
    questions = told["questions"]
    right = {when: sum(one[when] == one["right"] for one in questions) / len(questions) for when in ("before", "after")}
    rows = [
        ["right answer preferred", percent(told["preferred_before"]), percent(accuracy)],
        ["right answer given", percent(right["before"]), percent(right["after"])],
    ]
    print()
    table([f"{len(questions)} held-out questions", "before", "after"], rows)
    console().print(f"[dim]{MEASURES}[/dim]")
    sources = sorted({one["source"] for one in questions})
    few = [one for source in sources for one in [q for q in questions if q["source"] == source][:SHOWN]]
    table(
        ["question", "before", "after"],
        [[short(one["prompt"]), marked(one, "before"), marked(one, "after")] for one in few],
    )


def show_account(store: Path, run_id: str) -> None:
    """Two queries of the ledger and their answers."""
    _, ((steps,),) = query(store, "SELECT count(*) FROM current_step WHERE run_id = ?", [run_id])
    for title, sql in (("Fill by step", FILL.format(every=max(1, steps // 8))), ("Loss density by source", DENSITY)):
        columns, rows = query(store, sql, [run_id])
        shown = console()
        shown.print(f"[bold]{title}[/bold]")
        shown.print(f"[dim]{escaped(sql)}[/dim]")
        table(columns, rows)


def percent(share: float) -> str:
    """A share as per cent."""
    return f"{100 * share:.1f} %"


def marked(one: dict[str, str], when: str) -> str:
    """An answer and whether it is right."""
    return f"{one[when]} {'✓' if one[when] == one['right'] else '✗'}"


def short(text: str) -> str:
    """The end of a long question; the numbers stand there."""
    return text if len(text) <= 60 else "… " + text[-58:].partition(" ")[2]
