"""The step plan: which pairs make which optimizer step, whatever the topology.

A plan is a pure function of its datasets' fingerprints and a few settings (pairs per step, seed, source weights,
held-out share and salt, duplicates policy): its fingerprint covers these and nothing else, so that ranks, pack sizes
and the number of epochs may change under a run. Steps count from 1 across epochs, epochs from 0; the last step of an
epoch may be shorter and is kept. The state of a run is (plan fingerprint, step): there is no cursor and no buffer.

Held-out pairs are those whose prompt hashes below the share, so that two pairs with one prompt are never parted. The
hash is SplitMix64's finaliser (Steele, Lea and Flood, 2014) over the prompt's key and the salt: vectorised, and a
pair's side does not depend on what other pairs there are.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from blake3 import blake3

from training.config import DataConfig, PlanConfig
from training.data.fingerprint import file_fingerprint, fp
from training.data.order import Epoch, Group, apportion, draw_epoch
from training.data.table import EVERY, PairTable, gather
from training.errors import PlanError
from training.geometry import Layout

if TYPE_CHECKING:
    from training.data.shards import PairColumns

Integers = npt.NDArray[np.int64]

FORMAT = 1


class Prepared(Protocol):
    """What a plan needs of a dataset."""

    @property
    def fingerprint(self) -> str:
        """Identity of the dataset's ordered rows, tokenizer, template and recipe."""
        ...

    @property
    def inputs(self) -> dict[str, str]:
        """Fingerprints of the tokenizer, template and recipe."""
        ...

    @property
    def max_tokens(self) -> int | None:
        """The limit on a side's tokens."""
        ...

    def columns(self) -> PairColumns:
        """Lengths and places of all pairs."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What decides a plan, apart from its datasets' content."""

    datasets: tuple[str, ...]
    pairs_per_step: int
    seed: int
    weights: tuple[tuple[str, float], ...]
    held_out_share: float
    salt: str
    duplicates: str

    @property
    def fingerprint(self) -> str:
        """Identity of the plan."""
        return fp("plan", *(getattr(self, setting.name) for setting in fields(self)))

    @staticmethod
    def from_json(values: dict[str, Any]) -> Settings:
        """The settings that `asdict` and JSON made of them; JSON knows no tuples."""
        tuples: dict[str, Any] = {
            "weights": tuple((str(name), float(weight)) for name, weight in values["weights"]),
            "datasets": tuple(values["datasets"]),
        }
        return Settings(**{**values, **tuples})


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StepPlan:
    """Which pairs make which step.

    `train` and `held_out`: int64 indices of the table's pairs, rising. `dropped`: pairs left out as duplicates.
    `max_tokens`: the datasets' limit on a side.
    """

    settings: Settings
    table: PairTable
    train: Integers
    held_out: Integers
    dropped: int
    max_tokens: int
    groups: tuple[Group, ...]
    _drawn: dict[int, Epoch] = field(default_factory=dict[int, Epoch], repr=False)

    @property
    def fingerprint(self) -> str:
        """Identity of the plan: epochs, topology and pack sizes are no part of it."""
        return self.settings.fingerprint

    @property
    def pairs_per_step(self) -> int:
        """Pairs of every step but the last of an epoch."""
        return self.settings.pairs_per_step

    @property
    def steps_per_epoch(self) -> int:
        """Steps of one epoch, the shorter last one included."""
        return -(-len(self.train) // self.pairs_per_step)

    def steps(self, epochs: int) -> int:
        """Number of the last step of so many epochs."""
        return epochs * self.steps_per_epoch

    def epoch_of(self, step: int) -> int:
        """Epoch (from 0) of a step (from 1)."""
        assert step >= 1, f"steps count from 1, not {step}"
        return (step - 1) // self.steps_per_epoch

    def pairs_of(self, step: int) -> Integers:
        """int64[pairs of the step]: table indices, in order."""
        return self.epoch(self.epoch_of(step)).pairs[self._places(step)]

    def occurrence(self, step: int) -> Integers:
        """int64[pairs of the step]: how often each of them was shown in earlier steps."""
        return self.epoch(self.epoch_of(step)).seen[self._places(step)]

    def epoch(self, epoch: int) -> Epoch:
        """The whole epoch; the one asked for last is kept."""
        if epoch not in self._drawn:
            entropy = int(self.fingerprint.partition(":")[2], 16)
            drawn = draw_epoch(self.groups, epoch, entropy=entropy, pairs_per_step=self.pairs_per_step)
            self._drawn.clear()
            self._drawn[epoch] = drawn
        return self._drawn[epoch]

    def _places(self, step: int) -> slice:
        start = (step - 1) % self.steps_per_epoch * self.pairs_per_step
        return slice(start, start + self.pairs_per_step)


def make_plan(datasets: Sequence[Prepared], data: DataConfig, plan: PlanConfig) -> StepPlan:
    """Plan the steps over prepared datasets.

    Raises:
        PlanError: no dataset or no pair to train on; datasets of different tokenizers; a dataset given twice; weights
            that do not name the sources or cannot be met; a pair longer than a pack.
    """
    _check_datasets(datasets, data)
    unique = {dataset.fingerprint: dataset for dataset in datasets}
    columns = {fingerprint: dataset.columns() for fingerprint, dataset in unique.items()}
    table = gather(list(columns.items()))
    found = len(table)
    if data.duplicates == "drop":
        table = table.where(table.first_of_each_pair())
    settings = Settings(
        datasets=table.datasets,
        pairs_per_step=plan.pairs_per_step,
        seed=plan.seed,
        weights=tuple(sorted(data.weights.items())),
        held_out_share=data.held_out_share,
        salt=data.salt,
        duplicates=data.duplicates,
    )
    limits = [dataset.max_tokens for dataset in unique.values()]
    longest = int((table.prompt + np.maximum(table.chosen, table.rejected)).max(initial=0))
    max_tokens = max(longest if limit is None else limit for limit in limits)
    made = _assemble(settings, table, held_out(table.prompt_key, data.held_out_share, data.salt), found, max_tokens)
    room = plan.pack_tokens or 2 * max_tokens
    check_room(table, room, plan.layout, locate=lambda i: _locator(columns[table.datasets[table.dataset[i]]], table, i))
    return made


def _assemble(
    settings: Settings, table: PairTable, held: npt.NDArray[np.bool_], found: int, max_tokens: int
) -> StepPlan:
    train = np.flatnonzero(~held)
    if not len(train):
        raise PlanError(
            f"nothing to train on: {found} pairs in {len(settings.datasets)} datasets, {found - len(table)} of them "
            f"duplicates, {held.sum()} held out; give a dataset with pairs, or a smaller data.held_out_share"
        )
    return StepPlan(
        settings=settings,
        table=table,
        train=train,
        held_out=np.flatnonzero(held),
        dropped=found - len(table),
        max_tokens=max_tokens,
        groups=_groups(table, train, settings),
    )


def _check_datasets(datasets: Sequence[Prepared], data: DataConfig) -> None:
    if not datasets:
        raise PlanError("a plan needs at least one dataset; name prepared folders in data.datasets")
    first = datasets[0]
    for other in datasets[1:]:
        for name in ("tokenizer", "template", "recipe"):
            mine, theirs = first.inputs.get(name), other.inputs.get(name)
            if mine != theirs:
                raise PlanError(
                    f"datasets {first.fingerprint} and {other.fingerprint} were prepared with different {name}s, "
                    f"{mine} and {theirs}: one run cannot read both; prepare them alike"
                )
    if data.duplicates == "keep" and len({dataset.fingerprint for dataset in datasets}) < len(datasets):
        names = [dataset.fingerprint for dataset in datasets]
        twice = next(name for name in names if names.count(name) > 1)
        raise PlanError(
            f'dataset {twice} is given {names.count(twice)} times; name it once, or set data.duplicates = "drop"'
        )


def held_out(prompt_key: npt.NDArray[np.uint64], share: float, salt: str) -> npt.NDArray[np.bool_]:
    """bool[pairs]: which pairs are kept out of training, about `share` of all prompts."""
    mixed = prompt_key ^ np.frombuffer(blake3(salt.encode()).digest(8), "<u8")
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        mixed = (mixed ^ (mixed >> np.uint64(shift))) * np.uint64(factor)
    return (mixed ^ (mixed >> np.uint64(31))) < np.uint64(int(share * 2**64))


def _groups(table: PairTable, train: Integers, settings: Settings) -> tuple[Group, ...]:
    if not settings.weights:
        return (Group(name="all pairs", members=train, places=len(train)),)
    source = table.source[train]
    members = {table.sources[code]: train[source == code] for code in np.unique(source)}
    names = [name for name, _ in settings.weights]
    if set(names) != set(members):
        raise PlanError(
            f"data.weights names {', '.join(names)}, but there are pairs to train on from {', '.join(members)}: "
            f"every source needs a weight, and every weight a source"
        )
    places = apportion([weight for _, weight in settings.weights], len(train))
    groups = tuple(Group(name=n, members=members[n], places=p) for n, p in zip(names, places, strict=True))
    steps = -(-len(train) // settings.pairs_per_step)
    for group in groups:
        if not group.places:
            raise PlanError(
                f"data.weights gives source {group.name} less than one pair in an epoch of {len(train)}; raise its "
                f"weight, or leave its pairs out"
            )
        if group.repeats > max(1, steps - 1):
            raise PlanError(
                f"data.weights gives source {group.name} {group.places} places in an epoch of {steps} steps, so that "
                f"its {len(group.members)} pairs would stand {group.repeats} times each, and a step may show a pair "
                f"once: lower its weight or plan.pairs_per_step = {settings.pairs_per_step}"
            )
    return groups


def check_room(
    table: PairTable,
    pack_tokens: int,
    layout: Layout,
    *,
    pairs: Integers | None = None,
    locate: Callable[[int], str] | None = None,
) -> None:
    """Refuse pairs (all, if not told which) that no pack can hold; `locate` says where the pair at an index is from.

    Raises:
        PlanError: names the longest such pair and the pack_tokens that holds all.
    """
    tokens = table.tokens(layout, EVERY if pairs is None else pairs)
    most = int(tokens.max())
    if most > pack_tokens:
        longest = int(tokens.argmax()) if pairs is None else int(pairs[tokens.argmax()])
        where = locate(longest) if locate else f"shard {table.shard[longest]}, row {table.row[longest]}"
        raise PlanError(
            f"pair {table.pair_id[longest]} ({table.sources[table.source[longest]]}, {where}) takes {most} tokens in "
            f"the {layout} layout, but plan.pack_tokens = {pack_tokens}, and {(tokens > pack_tokens).sum()} pairs do "
            f"not fit; set it to at least {most}, or prepare with a smaller max_tokens"
        )


def _locator(columns: PairColumns, table: PairTable, i: int) -> str:
    row = np.flatnonzero((columns.shard == table.shard[i]) & (columns.row == table.row[i]))
    return str(columns.locator[int(row[0])])


def write_plan(plan: StepPlan, folder: Path) -> None:
    """Write `order.arrow` and then `plan.json`, each by rename: a folder without plan.json holds no plan.

    Two writers of one plan write the same bytes.
    """
    folder.mkdir(parents=True, exist_ok=True)
    held = np.zeros(len(plan.table), np.bool_)
    held[plan.held_out] = True
    with _renamed_to(folder / "order.arrow") as staging:
        table = plan.table.to_arrow().append_column("held_out", pa.array(held))
        with pa.OSFile(str(staging), "wb") as sink, pa.ipc.new_file(sink, table.schema) as writer:
            writer.write_table(table, max_chunksize=1 << 20)
        digest = file_fingerprint(staging)
    facts = {
        "format": FORMAT,
        "fingerprint": plan.fingerprint,
        "settings": asdict(plan.settings),
        "sources": plan.table.sources,
        "max_tokens": plan.max_tokens,
        "pairs": len(plan.table),
        "train": len(plan.train),
        "held_out": len(plan.held_out),
        "dropped": plan.dropped,
        "steps_per_epoch": plan.steps_per_epoch,
        "order": {"file": "order.arrow", "digest": digest},
    }
    with _renamed_to(folder / "plan.json") as staging:
        staging.write_text(json.dumps(facts, ensure_ascii=False, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def read_plan(folder: Path) -> StepPlan:
    """Read a plan; its table is mapped, not loaded.

    Raises:
        PlanError: there is no plan, it is of another format, or its files are not those that were written.
    """
    path = folder / "plan.json"
    try:
        facts = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise PlanError(f"{folder} holds no plan: plan.json is missing; make the plan again") from None
    except (OSError, ValueError) as error:
        raise PlanError(f"{path}: cannot be read: {error}; make the plan again") from None
    if facts.get("format") != FORMAT:
        raise PlanError(f"{path}: format {facts.get('format')}, but this version reads {FORMAT}; make the plan again")
    settings = Settings.from_json(facts["settings"])
    if settings.fingerprint != facts["fingerprint"]:
        raise PlanError(
            f"{path}: its settings make the plan {settings.fingerprint}, but it says {facts['fingerprint']}: it was "
            f"altered; make the plan again"
        )
    order = folder / facts["order"]["file"]
    found = file_fingerprint(order) if order.exists() else "no file"
    if found != facts["order"]["digest"]:
        raise PlanError(f"{order}: found {found}, but plan.json names {facts['order']['digest']}; make the plan again")
    columns = pa.ipc.open_file(pa.memory_map(str(order))).read_all()
    table = PairTable.from_arrow(columns, datasets=settings.datasets, sources=tuple(facts["sources"]))
    held = columns["held_out"].to_numpy()
    return _assemble(settings, table, held, len(table) + facts["dropped"], facts["max_tokens"])


@contextmanager
def _renamed_to(target: Path) -> Generator[Path, None, None]:
    """A new file beside `target` that takes its place when the block ends well, and is removed when it does not."""
    handle, name = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
    os.close(handle)
    staging = Path(name)
    try:
        yield staging
        with staging.open("rb") as written:
            os.fsync(written.fileno())
        staging.replace(target)
    finally:
        staging.unlink(missing_ok=True)
