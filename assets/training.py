"""From prepared drops to an aligned model, by week.

A week's plan reads the prepared drops up to its end. Dagster does not refuse a week whose drops are missing, so
`step_plan` does, or leaves them out and says so, as `weekly.completeness` states. What computes runs in processes of
its own, started by the launcher: a cancelled run leaves none of them, and a retry resumes.
"""

import tempfile
from functools import partial
from pathlib import Path

import dagster as dg

from assets import curves
from assets.launch import Accelerator, Launcher, Program
from assets.partitions import Calendar, Drop, wanted
from assets.progress import Progress, numbers, recorded
from assets.reporting import column_schema, markdown_table, plainly, portable
from assets.store import Made, ShardStore, current, made
from training.config import ProjectConfig, RunConfig, dump, load_run
from training.data.fingerprint import fp, model_fingerprint
from training.data.packing import pack_tokens_for, predict
from training.data.plan import make_plan, write_plan
from training.data.shards import open_dataset
from training.errors import IdentityError, PlanError
from training.ledger.facts import RUN, RunFacts, read_facts

OWNERS = ["team:pairledger"]


class Overrides(dg.Config):
    """Fields of the run that the launchpad may set for one run; the configuration holds the rest."""

    epochs: int | None = None
    lr: float | None = None
    beta: float | None = None

    def applied(self, run: RunConfig) -> RunConfig:
        """The run with these fields in place of the configured ones."""
        values = run.model_dump()
        for section, field in (("plan", "epochs"), ("optimizer", "lr"), ("objective", "beta")):
            value = getattr(self, field)
            if value is not None:
                values[section][field] = value
        return RunConfig.model_validate(values)


def prepared(instance: dg.DagsterInstance, project: ProjectConfig, week: str) -> tuple[dict[Drop, Made], list[Drop]]:
    """The prepared drops a week trains on, and those that exist but are not prepared.

    Raises:
        PlanError: one is missing and `weekly.completeness` is `require_all`, or there is none at all.
    """
    drops = wanted(project, week)
    found = current(instance, "preference_shards", [drop.key for drop in drops])
    ready = {drop: found[drop.key] for drop in drops if drop.key in found}
    missing = [drop for drop in drops if drop not in ready]
    names = ", ".join(f"{drop.source} × {drop.day}" for drop in missing)
    if missing and project.weekly.completeness == "require_all":
        raise PlanError(
            f"week {week} wants {len(drops)} drops, but {len(missing)} are not prepared: {names}; materialise their "
            f'preference_shards, or set weekly.completeness = "allow_missing" to train without them'
        )
    if not ready:
        raise PlanError(
            f"no drop up to the end of week {week} is prepared"
            + (f"; not prepared: {names}" if missing else ", and no source has one; choose a later week")
        )
    return ready, missing


@plainly()
def step_plan(
    context: dg.AssetExecutionContext, project: dg.ResourceParam[ProjectConfig], store: ShardStore
) -> dg.MaterializeResult:
    """Which pairs make which optimizer step, and what each step will count, known before an accelerator is taken."""
    ready, missing = prepared(context.instance, project, context.partition_key)
    plan = make_plan([open_dataset(store.path / one.path) for one in ready.values()], project.data, project.plan)
    folder = store.plan(plan.fingerprint)
    write_plan(plan, folder)
    predicted = predict(
        plan,
        epochs=project.plan.epochs,
        topology=project.devices.topology,
        pack_tokens=pack_tokens_for(plan, project),
        layout=project.plan.layout,
        buckets=project.plan.buckets,
    )
    return dg.MaterializeResult(
        data_version=dg.DataVersion(plan.fingerprint),
        metadata=portable(
            {
                "path": store.name(folder),
                "datasets": dg.MetadataValue.json(sorted(one.path for one in ready.values())),
                "drops": dg.MetadataValue.json([str(drop.key) for drop in ready]),
                "missing_drops": dg.MetadataValue.json([str(drop.key) for drop in missing]),
                "pairs": len(plan.train),
                "held_out": len(plan.held_out),
                "duplicates_dropped": plan.dropped,
                "steps": len(predicted),
                **curves.predicted_shares(predicted),
                "dagster/row_count": len(plan.table),
                "dagster/column_schema": column_schema(predicted.schema),
            }
        ),
    )


@plainly()
def dpo_run(
    context: dg.AssetExecutionContext,
    config: Overrides,
    project: dg.ResourceParam[ProjectConfig],
    store: ShardStore,
    launcher: dg.ResourceParam[Launcher],
    accelerator: Accelerator,
) -> dg.MaterializeResult:
    """One training run over the week's plan, resumed where an earlier attempt of it stopped."""
    plan = made(context.instance, "step_plan", context.partition_key)
    folders = [store.path / str(path) for path in _json(plan, "datasets")]
    for folder in folders:
        open_dataset(folder)  # a run by hand may have passed a failed check: the shards are hashed again here
    run = config.applied(project.run(tuple(map(str, folders))))
    run = run.model_copy(update={"devices": accelerator.devices(run.devices)})
    with tempfile.TemporaryDirectory() as place:
        toml = Path(place) / "RUN.toml"
        toml.write_text(dump(run), encoding="utf-8")
        report = launcher.run(
            context,
            Program(
                module="training.run",
                args=("--config", str(toml), "--store", store.root, "--partition", context.partition_key),
                processes=run.devices.processes,
            ),
            watch=Progress(context, store.path / "runs"),
        )
    assert report["finished"], "a run that stops early ends with a signal's exit code"
    run_dir = store.path / "runs" / str(report["run_id"])
    facts = read_facts(run_dir / RUN, RunFacts)
    if facts.plan != plan.fingerprint:
        raise IdentityError(
            f"run {facts.run_id} trained on plan {facts.plan}, but the week's step_plan is {plan.fingerprint}; "
            "materialise step_plan and dpo_run again"
        )
    steps = recorded(run_dir)
    return dg.MaterializeResult(
        data_version=dg.DataVersion(facts.fingerprint),
        metadata=portable(
            {
                "path": store.name(run_dir),
                "run_id": facts.run_id,
                "plan": facts.plan,
                "model": facts.model,
                "reference": facts.reference,
                "dagster/row_count": len(steps),
                **(numbers(steps[-1]) if steps else {}),
                "fill_and_loss_density": curves.shares(steps),
                "loss_and_accuracy": curves.learning(steps),
            }
        ),
    )


@plainly()
def aligned_model(context: dg.AssetExecutionContext, store: ShardStore) -> dg.MaterializeResult:
    """The run's exported model: safetensors with tokenizer and model card, loadable by plain transformers."""
    run = made(context.instance, "dpo_run", context.partition_key)
    folder = store.path / run.path / "export"
    fingerprint = model_fingerprint(folder)
    card = folder / "README.md"
    return dg.MaterializeResult(
        data_version=dg.DataVersion(fingerprint),
        metadata=portable(
            {
                "path": store.name(folder),
                "run": run.fingerprint,
                "bytes": sum(file.stat().st_size for file in folder.iterdir()),
                "model_card": dg.MetadataValue.md(card.read_text(encoding="utf-8")) if card.exists() else None,
            }
        ),
    )


@plainly()
def preference_eval(
    context: dg.AssetExecutionContext,
    store: ShardStore,
    launcher: dg.ResourceParam[Launcher],
) -> dg.MaterializeResult:
    """How the model judges the pairs that its plan held out, all together and by source."""
    run_dir = store.path / made(context.instance, "dpo_run", context.partition_key).path
    model = made(context.instance, "aligned_model", context.partition_key)
    newest = max(run_dir.glob("attempts/*"), key=lambda folder: int(folder.name))
    run = load_run(newest / "config.toml")
    extras = {"run": run.model_dump(mode="json"), "store": store.root, "model": str(store.path / model.path)}
    judged = launcher.run(context, Program(module="assets.tasks", args=("evaluate",), extras=extras))["judged"]
    everything = judged.pop("")
    columns = ["source", "pairs", "accuracy", "ties", "margin"]
    rows = [(source, *_judgement(found).values()) for source, found in judged.items()]
    return dg.MaterializeResult(
        data_version=dg.DataVersion(fp("eval", model.fingerprint, everything, judged)),
        metadata=portable(
            {
                **_judgement(everything),
                "dagster/row_count": everything["pairs"],
                "model": model.fingerprint,
                "by_source": markdown_table(columns, rows),
            }
        ),
    )


def _judgement(sums: dict[str, float]) -> dict[str, float]:
    """Means of a judgement's sums; accuracy counts strict wins."""
    pairs = sums["pairs"]
    margin = (sums["chosen_reward_sum"] - sums["rejected_reward_sum"]) / pairs
    return {"pairs": pairs, "accuracy": sums["wins"] / pairs, "ties": sums["ties"], "margin": margin}


def _json(one: Made, name: str) -> list[str]:
    value = one.metadata[name].value
    assert isinstance(value, list), f"{name} is written as a list by step_plan"
    return [str(item) for item in value]


def assets(calendar: Calendar, project: ProjectConfig) -> list[dg.AssetsDefinition]:
    """The group `training`: what depends on what, and what waits for the accelerator.

    There is an evaluation where pairs are held out, and reference scores are waited for where the objective reads them.
    """
    weekly = partial(dg.asset, group_name="training", partitions_def=calendar.weeks, owners=OWNERS, code_version="1")
    scores = ["reference_scores"] if project.objective.reads_reference else []
    evaluated = weekly(deps=["aligned_model"], kinds={"pytorch"}, pool="accelerator")(preference_eval)
    return [
        weekly(deps=["preference_shards"], kinds={"arrow"})(step_plan),
        weekly(
            deps=["step_plan", *scores],
            kinds={"pytorch"},
            pool="accelerator",
            retry_policy=dg.RetryPolicy(max_retries=1),
        )(dpo_run),
        weekly(deps=["dpo_run"], kinds={"huggingface"})(aligned_model),
        *([evaluated] if project.data.held_out_share else []),
    ]
