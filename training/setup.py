"""What a run is, known before any weight is read: its data, its plan, its identity, its folder.

A run's identity is everything that decides its weights but the number of epochs: tokenizer, template and recipe of its
datasets, the plan, the model and the reference, precision, layout, and the recipes of objective and optimizer.
Packing, topology, device and places on disk are no part of it.
"""

from __future__ import annotations

import urllib.parse
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import pyarrow as pa
from transformers import PreTrainedConfig

from training.config import RunConfig
from training.data.fingerprint import canonical_json, model_fingerprint, run_fingerprint
from training.data.packing import pack_tokens_for, predict
from training.data.plan import StepPlan, make_plan, write_plan
from training.data.shards import Dataset, open_dataset
from training.errors import ConfigError, ModelError
from training.ledger.facts import PREDICTED, RUN, RunFacts, UsedDataset, write_facts
from training.model import inspect
from training.reference import file_name


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Prepared:
    """A run before any weight is read: what it is, and where it lies."""

    config: RunConfig
    run_id: str
    run_dir: Path
    store: Path
    plan: StepPlan
    datasets: Mapping[str, Dataset]
    identity: Mapping[str, str]
    pack_tokens: int

    @property
    def total(self) -> int:
        """Number of the last step."""
        return self.plan.steps(self.config.plan.epochs)

    @property
    def fingerprint(self) -> str:
        """The run's fingerprint."""
        return run_fingerprint(self.identity)


def prepare(config: RunConfig, store: Path, partition: str | None = None) -> Prepared:
    """Everything about a run that needs no weights: datasets verified, plan made, identity known.

    Raises:
        ConfigError, InputError: what is missing or does not fit, by name.
    """
    if not config.data.datasets or not config.model.path:
        raise ConfigError("a run needs data.datasets and model.path; name them in its configuration")
    datasets = {dataset.fingerprint: dataset for dataset in map(open_dataset, map(Path, config.data.datasets))}
    plan = make_plan(list(datasets.values()), config.data, config.plan)
    model = model_fingerprint(Path(config.model.path))
    if config.save.validate_steps and not len(plan.held_out):
        raise ConfigError(
            f"save.validate_steps = {config.save.validate_steps}, but data.held_out_share = "
            f"{config.data.held_out_share} holds none of {len(plan.table)} pairs out; raise it, or judge none"
        )
    vocabulary = check_degrees(config).vocab_size
    for dataset in datasets.values():
        if (needed := dataset.manifest.vocab_size) > vocabulary:
            raise ModelError(
                f"dataset {dataset.path} has a vocabulary of {needed}, but model {config.model.path} has {vocabulary}; "
                "prepare it with the model's own tokenizer"
            )
    identity = identity_of(config, plan, next(iter(datasets.values())).inputs, model)
    run_id = "run-" + run_fingerprint(identity).partition(":")[2][:12]
    run_id += "" if partition is None else "-" + urllib.parse.quote(partition, safe="")
    return Prepared(
        config=config,
        run_id=run_id,
        run_dir=store / "runs" / run_id,
        store=store,
        plan=plan,
        datasets=datasets,
        identity=identity,
        pack_tokens=pack_tokens_for(plan, config),
    )


def check_degrees(config: RunConfig) -> PreTrainedConfig:
    """The text configuration of the model, once this topology can serve it; asked before any process starts.

    Raises:
        ModelError: as `training.model.inspect`.
        ConfigError: attention heads that cannot be shared evenly by the ranks that exchange sequence for heads.
    """
    settings, _ = inspect(config.model.path)
    text, ulysses = settings.get_text_config(), config.devices.ulysses
    if text.num_attention_heads % ulysses:
        fitting = [n for n in range(1, text.num_attention_heads + 1) if text.num_attention_heads % n == 0]
        raise ConfigError(
            f"devices.ulysses = {ulysses} cannot share the {text.num_attention_heads} attention heads of "
            f"{config.model.path} evenly; set it to one of {', '.join(map(str, fitting))}; cp takes more"
        )
    return text


def identity_of(config: RunConfig, plan: StepPlan, inputs: Mapping[str, str], model: str) -> dict[str, str]:
    """What a run is, by field: everything that decides its weights but the number of epochs."""
    optimizer = config.optimizer.model_dump(exclude={"schedule", "warmup_steps"})
    lora = config.model.lora
    schedule = config.optimizer.model_dump(include={"schedule", "warmup_steps"})
    return {
        **{name: inputs[name] for name in ("tokenizer", "template", "recipe")},
        "datasets": " ".join(plan.table.datasets),
        "plan": plan.fingerprint,
        "model": model,
        "reference": model if config.objective.reads_reference else "none",
        "precision": config.model.dtype,
        "layout": config.plan.layout,
        "adapter": canonical_json(lora.model_dump(exclude={"export"})).decode() if lora else "none",
        "objective": canonical_json(config.objective.model_dump()).decode(),
        "optimizer": canonical_json(optimizer).decode(),
        "schedule": canonical_json(schedule).decode(),
    }


def describe(run: Prepared, partition: str | None) -> None:
    """Write what the run is and what it will count: its plan, `predicted.arrow` and `run.json`, each once."""
    write_plan(run.plan, run.store / "plans" / file_name(run.plan.fingerprint))
    plan = run.config.plan
    predicted = predict(
        run.plan,
        epochs=plan.epochs,
        topology=run.config.devices.topology,
        pack_tokens=run.pack_tokens,
        layout=plan.layout,
        buckets=plan.buckets,
    )
    staging = run.run_dir / f".{PREDICTED}"
    with pa.OSFile(str(staging), "wb") as sink, pa.ipc.new_file(sink, predicted.schema) as writer:
        writer.write_table(predicted)
    staging.rename(run.run_dir / PREDICTED)
    if (run.run_dir / RUN).exists():
        return
    reference = run.identity["reference"]
    facts = RunFacts(
        run_id=run.run_id,
        partition=partition,
        fingerprint=run.fingerprint,
        plan=run.plan.fingerprint,
        model=run.identity["model"],
        reference=None if reference == "none" else reference,
        layout=plan.layout,
        created_at=datetime.now(UTC),
        datasets=tuple(
            UsedDataset(fingerprint=name, path=_named(dataset.path, run.store))
            for name, dataset in run.datasets.items()
        ),
    )
    write_facts(run.run_dir / RUN, facts)


def _named(path: Path, store: Path) -> str:
    """A dataset's folder: relative to the store where it lies inside it."""
    own, root = path.resolve(), store.resolve()
    return str(own.relative_to(root)) if own.is_relative_to(root) else str(own)
