"""One frozen configuration of a run and of a project, validated once; every rule that spans fields lives here.

`RUN.toml` holds the sections of `RunConfig`. `pairledger.toml` holds the same sections (without `data.datasets` and
with the model's path) and adds the store, the sources, the tokenizer and the limits: `ProjectConfig`. Unknown keys are
refused with the known ones that are near. Relative paths are relative to the file that names them.
"""

from __future__ import annotations

import difflib
import json
import os
import tomllib
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, cast

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from training.errors import ConfigError

Share = Annotated[float, Field(ge=0, lt=1)]
Positive = Annotated[int, Field(ge=1)]
Weight = Annotated[float, Field(gt=0)]


class Section(BaseModel):
    """A frozen table of a configuration file; keys it does not know are an error."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class DataConfig(Section):
    """Which pairs a run may learn from."""

    datasets: tuple[str, ...] = ()
    """Folders of prepared datasets."""
    weights: dict[str, Weight] = {}
    """Shares of pairs by source; empty means every pair once an epoch."""
    duplicates: Literal["keep", "drop"] = "keep"
    """What becomes of a pair that stands in more than one dataset of the plan."""
    held_out_share: Share = 0.0
    """Share of prompts kept out of training, chosen by a salted hash of the prompt."""
    salt: str = "pairledger"


class PlanConfig(Section):
    """How pairs become steps and packs."""

    pairs_per_step: Positive = 64
    epochs: Positive = 1
    seed: int = 0
    pack_tokens: Positive | None = None
    """Room of one pack; 2 * max_tokens of the datasets when not given."""
    layout: Literal["shared", "concat"] = "shared"
    buckets: tuple[Positive, ...] = ()
    """Row lengths that a pack is padded up to, so that shapes repeat; empty pads to the alignment multiple alone."""


class LoraConfig(Section):
    """An adapter that is trained in the model's stead, which stays frozen."""

    rank: Positive = 16
    alpha: Positive = 32
    """The adapter's part counts alpha / rank times."""
    targets: tuple[str, ...] = ("all-linear",)
    """Names of the linear layers that get one; `all-linear` means all but the head."""
    export: Literal["merged", "adapter"] = "merged"
    """Whether the export is a whole model, or the adapter alone."""


class ModelConfig(Section):
    """The policy that is trained."""

    path: str = ""
    """Folder of a Hugging Face causal language model."""
    dtype: Literal["fp32", "bf16"] = "fp32"
    """Precision of the forward and backward pass; weights and optimizer state stay fp32."""
    checkpointing: bool = False
    """Recompute activations in the backward pass."""
    compile: bool = False
    """Compile norms and feed-forward blocks; needs a C++ compiler on a CPU, triton on a GPU."""
    lora: LoraConfig | None = None
    """Train an adapter instead of the whole model."""


REFERENCE_FREE = frozenset({"simpo", "orpo"})
SMOOTHED = frozenset({"sigmoid", "sigmoid_norm", "robust", "exo_pair"})
OTHER_LOSSES = frozenset({"ipo", "hinge", "apo_zero", "apo_down", "sppo_hard", "nca_pair", "discopop"})
LOSS_NAMES = tuple(sorted(REFERENCE_FREE | SMOOTHED | OTHER_LOSSES))
"""The losses of `training.loss`: those without a reference, those that read `label_smoothing`, and the rest."""


class ObjectiveConfig(Section):
    """What a step minimises."""

    losses: dict[str, Weight] = {"sigmoid": 1.0}
    """Weighted combination of losses by name."""
    beta: Annotated[float, Field(gt=0)] = 0.1
    label_smoothing: Annotated[float, Field(ge=0, lt=0.5)] = 0.0
    """Share of labels that the losses which know of it take to be flipped."""
    sft_weight: Annotated[float, Field(ge=0)] = 0.0
    """Weight of the chosen side's negative log-likelihood per token (RPO)."""
    simpo_margin: Annotated[float, Field(ge=0)] = 0.5
    """Margin by which SimPO wants the chosen side ahead."""
    reference: Literal["stored", "live", "none"] = "stored"
    """`stored` scores are computed once per dataset and model; a `live` frozen model scores every pack anew (the model
    without its adapter where it has one); `none` counts the reference as 0 everywhere."""

    @property
    def reads_reference(self) -> bool:
        """Whether any loss compares with a reference, so that there has to be one."""
        return self.reference != "none" and not REFERENCE_FREE.issuperset(self.losses)

    @model_validator(mode="after")
    def _losses_are_known(self) -> ObjectiveConfig:
        unknown = sorted(set(self.losses) - set(LOSS_NAMES))
        if unknown or not self.losses:
            raise ValueError(f"losses names {unknown or 'nothing'}; choose from {', '.join(LOSS_NAMES)}")
        if self.label_smoothing and not SMOOTHED & set(self.losses):
            raise ValueError(
                f"label_smoothing = {self.label_smoothing} is read by {', '.join(sorted(SMOOTHED))}, and losses names "
                f"{', '.join(self.losses)}; set it to 0"
            )
        return self


class OptimizerConfig(Section):
    """AdamW and its schedule."""

    lr: Annotated[float, Field(gt=0)] = 1e-6
    betas: tuple[Share, Share] = (0.9, 0.999)
    eps: Annotated[float, Field(gt=0)] = 1e-8
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    clip: Annotated[float, Field(gt=0)] | None = 1.0
    """Largest norm of the whole gradient; None leaves it alone."""
    warmup_steps: Annotated[int, Field(ge=0)] = 0
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    nonfinite: Literal["stop", "skip"] = "stop"
    """What a step with a non-finite gradient does: stop the run, or be skipped and counted."""


class Topology(BaseModel):
    """How ranks divide the work; the mesh dimensions' sizes.

    `dp_replicate * dp_shard` ranks see different packs; `cp * ulysses` ranks share one pack.
    """

    model_config = ConfigDict(frozen=True)

    dp_replicate: Positive = 1
    dp_shard: Positive = 1
    cp: Positive = 1
    ulysses: Positive = 1

    @property
    def dp(self) -> int:
        """Ranks that see different packs."""
        return self.dp_replicate * self.dp_shard

    @property
    def sp(self) -> int:
        """Ranks that share one pack."""
        return self.cp * self.ulysses

    @property
    def processes(self) -> int:
        """All ranks."""
        return self.dp * self.sp

    @property
    def multiple(self) -> int:
        """What a row's length is padded to a multiple of: 2 * cp * ulysses, ulysses alone where cp is 1."""
        return self.ulysses if self.cp == 1 else 2 * self.cp * self.ulysses


class DevicesConfig(Section):
    """On what a run computes."""

    kind: Literal["auto", "cpu", "gpu", "npu"] = "auto"
    processes: Positive = 1
    dp_replicate: Positive = 1
    dp_shard: Positive = 1
    cp: Positive = 1
    ulysses: Positive = 1
    peak_flops: Annotated[float, Field(gt=0)] | None = None
    """Declared peak of one device in FLOP/s, for model FLOPs utilisation."""

    @property
    def topology(self) -> Topology:
        """The mesh these numbers describe."""
        return Topology(dp_replicate=self.dp_replicate, dp_shard=self.dp_shard, cp=self.cp, ulysses=self.ulysses)

    @model_validator(mode="after")
    def _degrees_make_the_processes(self) -> DevicesConfig:
        if self.topology.processes != self.processes:
            raise ValueError(
                f"processes = {self.processes}, but dp_replicate * dp_shard * cp * ulysses = {self.dp_replicate} * "
                f"{self.dp_shard} * {self.cp} * {self.ulysses} = {self.topology.processes}; make them equal"
            )
        return self


class SaveConfig(Section):
    """When a run is saved, and as what."""

    steps: Positive | None = None
    """Save every so many steps. The end of an epoch, the last step and one that is told to stop are always saved."""
    minutes: Annotated[float, Field(gt=0)] | None = None
    """Save when so many minutes have passed since the last save."""
    keep: Positive = 2
    """How many of the newest checkpoints stay, beside the one with the lowest held-out loss."""
    every: Positive | None = None
    """Checkpoints of each so many steps stay as well."""
    grace_seconds: Positive = 15
    """How long the processes of a run that is told to stop have for their step and its checkpoint, before SIGKILL."""
    validate_steps: Positive | None = None
    """Judge the held-out pairs every so many steps, and after the last one."""
    export_dtype: Literal["source", "bf16", "fp32"] = "source"


class RunConfig(Section):
    """Everything that decides what a run does."""

    data: DataConfig = DataConfig()
    plan: PlanConfig = PlanConfig()
    model: ModelConfig = ModelConfig()
    objective: ObjectiveConfig = ObjectiveConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    devices: DevicesConfig = DevicesConfig()
    save: SaveConfig = SaveConfig()

    @model_validator(mode="after")
    def _sections_fit(self) -> RunConfig:
        if self.save.validate_steps and not self.data.held_out_share:
            raise ValueError(
                f"save.validate_steps = {self.save.validate_steps}, but data.held_out_share is 0, so that there is no "
                "pair to judge; set it above 0, or leave validate_steps out"
            )
        multiple, room = self.devices.topology.multiple, self.plan.pack_tokens
        if room is not None and room % multiple:
            raise ValueError(
                f"plan.pack_tokens = {room} is not a multiple of {multiple}, which this topology needs; "
                f"set it to {-(-room // multiple) * multiple}"
            )
        return self


class SourceConfig(Section):
    """One named origin of pairs."""

    files: tuple[str, ...]
    """Paths, globs, folders or fsspec URLs; `{drop}` in one stands for the day."""
    format: str = "auto"
    map: dict[str, str] = {}
    """Wanted column = the column's name in the files."""
    day: str | None = None
    """Day (YYYY-MM-DD) at which a source without dated drops lands; the first day of one whose files hold `{drop}`."""


class TokenizerConfig(Section):
    """Which tokenizer and chat template turn pairs into tokens."""

    path: str = ""
    template: str | None = None
    """Jinja file used instead of the tokenizer's own chat template."""
    date: str | None = None
    """Day (YYYY-MM-DD) that a template which asks for the date is given."""


class LimitsConfig(Section):
    """What a pair must keep to."""

    max_tokens: Positive = 2048
    overflow: Literal["drop", "prompt_left", "completion_right"] = "drop"
    max_quarantine: Annotated[float, Field(ge=0, le=1)] = 0.5
    """Largest share of a source's rows that may be quarantined before its check fails."""


class WeeklyConfig(Section):
    """What the weekly training runs of the Dagster project learn from."""

    weeks: Positive | None = None
    """How many weeks of drops, the run's own included; all since the first drop when not given."""
    completeness: Literal["require_all", "allow_missing"] = "require_all"
    """Whether a drop that exists but is not prepared fails the plan, or is left out and recorded."""


class ProjectConfig(RunConfig):
    """`pairledger.toml`: a run's sections with the store, sources, tokenizer and limits."""

    store: str = "store"
    sources: dict[str, SourceConfig] = {}
    tokenizer: TokenizerConfig = TokenizerConfig()
    limits: LimitsConfig = LimitsConfig()
    weekly: WeeklyConfig = WeeklyConfig()

    def run(self, datasets: tuple[str, ...]) -> RunConfig:
        """The run configuration that trains on these dataset folders."""
        own: dict[str, Any] = {name: getattr(self, name) for name in RunConfig.model_fields}
        return RunConfig.model_validate({**own, "data": self.data.model_copy(update={"datasets": datasets})})


Config = TypeVar("Config", bound=RunConfig)


def load_run(path: str | Path) -> RunConfig:
    """Read a run's configuration.

    Raises:
        ConfigError: the file is missing, is not TOML, or breaks a rule; every broken rule is named at once.
    """
    config = parse(_read(path), RunConfig, where=str(path))
    base = Path(path).resolve().parent
    data = config.data.model_copy(update={"datasets": tuple(_absolute(base, p) for p in config.data.datasets)})
    model = config.model.model_copy(update={"path": _absolute(base, config.model.path)})
    return config.model_copy(update={"data": data, "model": model})


def load_project(path: str | Path, *, base: Path | None = None) -> ProjectConfig:
    """Read `pairledger.toml`; relative paths are relative to its folder, or to `base`.

    Raises:
        ConfigError: as `load_run`.
    """
    config = parse(_read(path), ProjectConfig, where=str(path))
    base = base or Path(path).resolve().parent
    sources = {
        name: source.model_copy(update={"files": tuple(_absolute(base, f) for f in source.files)})
        for name, source in config.sources.items()
    }
    tokenizer = config.tokenizer.model_copy(
        update={
            "path": _absolute(base, config.tokenizer.path),
            "template": config.tokenizer.template and _absolute(base, config.tokenizer.template),
        }
    )
    model = config.model.model_copy(update={"path": _absolute(base, config.model.path)})
    store = _absolute(base, config.store)
    return config.model_copy(update={"sources": sources, "tokenizer": tokenizer, "model": model, "store": store})


def dump(config: RunConfig) -> str:
    """The configuration as the TOML of a RUN.toml: every field that has a value, so that defaults may move later."""
    lines: list[str] = []
    for section in RunConfig.model_fields:
        fields: dict[str, Any] = getattr(config, section).model_dump()
        lines += [
            f"[{section}]",
            *(f"{key} = {_toml(value)}" for key, value in fields.items() if value is not None),
            "",
        ]
    return "\n".join(lines)


def _toml(value: Any) -> str:
    if isinstance(value, dict):
        return (
            "{ " + ", ".join(f"{_toml(str(k))} = {_toml(v)}" for k, v in cast("dict[str, Any]", value).items()) + " }"
        )
    if isinstance(value, list | tuple):
        return "[" + ", ".join(_toml(item) for item in cast("list[Any]", value)) + "]"
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")  # JSON's scalars are TOML's but for DEL


def store_root(given: str | None) -> Path:
    """The store: as given, else PAIRLEDGER_STORE, else that of the working directory's pairledger.toml, else ./store.

    Raises:
        ConfigError: as `load_project`.
    """
    if given or os.environ.get("PAIRLEDGER_STORE"):
        return Path(given or os.environ["PAIRLEDGER_STORE"])
    project = Path("pairledger.toml")
    return Path(load_project(project).store if project.is_file() else ProjectConfig().store)


def parse(values: dict[str, Any], kind: type[Config], *, where: str) -> Config:
    """Validate a configuration's values.

    Raises:
        ConfigError: names `where`, each field, the value found and the rule; an unknown key is shown with near ones.
    """
    try:
        return kind.model_validate(values)
    except ValidationError as error:
        lines = [_sentence(kind, found) for found in error.errors()]
        raise ConfigError(f"{where}: " + "; ".join(lines)) from None


def _sentence(kind: type[Section], found: Any) -> str:
    place = [str(part) for part in found["loc"]]
    name = ".".join(place)
    if found["type"] == "extra_forbidden":
        known = list(_section_at(kind, place[:-1]).model_fields)
        near = difflib.get_close_matches(place[-1], known, n=3, cutoff=0.5)
        return f"unknown key {name}; " + (f"did you mean {', '.join(near)}?" if near else f"known: {', '.join(known)}")
    if found["type"] == "value_error":
        return (f"{name}: " if name else "") + str(found["ctx"]["error"])
    return f"{name} = {found['input']!r}: {found['msg']}"


def _section_at(kind: type[Section], place: list[str]) -> type[Section]:
    for part in place:
        field = kind.model_fields.get(part)
        if field is None:  # a key of a table of sections, such as a source's name
            continue
        inner = field.annotation
        candidates = [inner, *getattr(inner, "__args__", ())]
        kind = next((c for c in candidates if isinstance(c, type) and issubclass(c, Section)), kind)
    return kind


def _read(path: str | Path) -> dict[str, Any]:
    try:
        return tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"{path}: there is no such configuration file") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from None
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path}: is not TOML: {error}") from None


def _absolute(base: Path, path: str) -> str:
    return path if not path or "://" in path else str(base / Path(path).expanduser())
