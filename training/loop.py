"""The loop: pack a step, do it, write its line, save where a save is due.

The lines of all steps up to s are on disk before checkpoint s is. Counters come from the packs' geometry and are joined
with what the step computed; nothing here waits for the device.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING

import numpy as np
import torch

from training.config import RunConfig
from training.data.packing import pack_step
from training.data.plan import StepPlan
from training.errors import TrainingError
from training.geometry import Pack
from training.ledger.flops import ModelShape
from training.ledger.meter import Joined, Reading, SourceCounts, join, measure
from training.ledger.record import PairRow, SourceRow, StepRecord
from training.ledger.writer import LedgerWriter
from training.model import Policy
from training.parallel.device import Device
from training.reference import Floats
from training.scores import batch_of
from training.step import Microbatch, Outcome, learning_rate, train_step

if TYPE_CHECKING:
    from training.data.shards import Dataset
    from training.data.tokenize import TokenizedPair

log = logging.getLogger("training")

Progress = Callable[[StepRecord, int], None]
"""Told of every step's record and of the number of the last step."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Work:
    """All that the steps of an attempt read; `reference` is float32[2, pairs of the plan's table]."""

    config: RunConfig
    run_id: str
    attempt: int
    plan: StepPlan
    datasets: Mapping[str, Dataset]
    policy: Policy
    optimizer: torch.optim.Optimizer
    device: Device
    reference: Floats
    pack_tokens: int
    shape: ModelShape | None

    @property
    def total(self) -> int:
        """Number of the last step."""
        return self.plan.steps(self.config.plan.epochs)

    def take(self, index: int) -> TokenizedPair:
        """A pair of the plan's table with its ids."""
        table = self.plan.table
        dataset = self.datasets[table.datasets[table.dataset[index]]]
        return dataset.take(int(table.shard[index]), int(table.row[index]))


def train(
    work: Work,
    *,
    start: int,
    writer: LedgerWriter,
    save: Callable[[int], None],
    stop: Callable[[], bool],
    progress: Progress | None,
) -> StepRecord | None:
    """Do steps `start` to the last; gives the record of the last one that was done and saved.

    `stop` is asked after every step: where it says yes, the step is saved and the loop ends.

    Raises:
        TrainingError: as `train_step`, naming the step.
    """
    every, save_s, record = work.config.save.steps, 0.0, None
    for step in range(start, work.total + 1):
        try:
            record = do_step(work, step, save_s=save_s)
        except TrainingError as error:
            raise TrainingError(f"step {step}: {error}") from None
        writer.append(record)
        _log(record, work.total)
        if progress:
            progress(record, work.total)
        stopping, save_s = stop(), 0.0
        if step == work.total or stopping or (every and step % every == 0):
            began = time.perf_counter()
            save(step)
            save_s = time.perf_counter() - began
        if stopping:
            break
    return record


def metrics(record: StepRecord) -> dict[str, float]:
    """A step's numbers as means over its pairs; what is unknown is left out."""
    pairs = len(record.pairs)
    sums = {
        "accuracy": record.wins,
        "ties": record.ties,
        "chosen_reward": record.chosen_reward_sum,
        "rejected_reward": record.rejected_reward_sum,
    }
    means = {name: value / pairs for name, value in sums.items() if value is not None}
    return means if record.loss is None else {"loss": record.loss, **means}


def _log(record: StepRecord, total: int) -> None:
    shown = "  ".join(f"{name} {value:.4f}" for name, value in metrics(record).items())
    log.info("step %d/%d  epoch %d  %s", record.step, total, record.epoch, shown)


def do_step(work: Work, step: int, *, save_s: float) -> StepRecord:
    """One step and its record; `save_s` is the time spent saving since the last one."""
    began = time.perf_counter()
    packs, microbatches, order = _load(work, step)
    table = work.plan.table
    names = [[table.sources[table.source[i]] for i in members] for members in order]
    reading = join([measure(packs, names, pack_tokens=work.pack_tokens, model=work.shape)])
    loaded = time.perf_counter()
    outcome = train_step(
        work.policy,
        work.optimizer,
        microbatches,
        pairs=len(work.plan.pairs_of(step)),
        rate=learning_rate(step, work.total, work.config.optimizer),
        config=work.config,
        device=work.device,
    )
    indices = [i for members in order for i in members]
    return StepRecord(
        run_id=work.run_id,
        attempt=work.attempt,
        step=step,
        epoch=work.plan.epoch_of(step),
        ended_at=datetime.now(UTC),
        counters=reading.total.counters if reading.total else None,
        flops=_float(reading.total.flops if reading.total else None),
        ranks_expected=reading.ranks_expected,
        ranks_reported=reading.ranks_reported,
        unknown_reason=reading.unknown_reason,
        loss=outcome.loss,
        grad_norm=outcome.grad_norm,
        learning_rate=outcome.learning_rate,
        wins=outcome.wins,
        ties=outcome.ties,
        chosen_reward_sum=float(outcome.chosen_rewards.sum()),
        rejected_reward_sum=float(outcome.rejected_rewards.sum()),
        data_s=loaded - began,
        compute_s=outcome.compute_s,
        optimizer_s=outcome.optimizer_s,
        save_s=save_s,
        sources=_source_rows(reading, outcome, [name for pack in names for name in pack]),
        pairs=_pair_rows(work, step, indices, outcome),
    )


def _load(work: Work, step: int) -> tuple[list[Pack], list[Microbatch], Sequence[Sequence[int]]]:
    """This rank's packs of a step, on the host and on the device, and the table indices of their pairs."""
    plan, topology = work.config.plan, work.config.devices.topology
    packed = pack_step(
        work.plan,
        step,
        topology=topology,
        pack_tokens=work.pack_tokens,
        layout=plan.layout,
        buckets=plan.buckets,
    )
    (order,), (lengths,) = packed.ranks, packed.lengths
    packs: list[Pack] = []
    microbatches: list[Microbatch] = []
    for members, length in zip(order, lengths, strict=True):
        pack, batch = batch_of(
            [work.take(i) for i in members],
            layout=plan.layout,
            device=work.device.torch,
            length=length,
            multiple=topology.multiple,
        )
        tokens = np.array(batch.rows_by_side, np.float32).reshape(-1, 2).T
        reference = work.reference[:, list(members)]
        packs.append(pack)
        microbatches.append(
            Microbatch(
                batch=batch,
                reference=torch.from_numpy(reference).to(work.device.torch, non_blocking=True),
                tokens=torch.from_numpy(tokens.copy()).to(work.device.torch, non_blocking=True),
            )
        )
    return packs, microbatches, order


def _source_rows(reading: Joined[Reading], outcome: Outcome, sources: Sequence[str]) -> tuple[SourceRow, ...]:
    of = np.array(sources)
    return tuple(
        _source_row(name, reading.total.sources.get(name) if reading.total else None, outcome, of == name)
        for name in sorted(set(sources))
    )


def _source_row(name: str, counts: SourceCounts | None, outcome: Outcome, own: np.ndarray) -> SourceRow:
    chosen, rejected = outcome.chosen_rewards[own], outcome.rejected_rewards[own]
    return SourceRow(
        source=name,
        pairs=counts and counts.pairs,
        documents=counts and counts.documents,
        source_tokens=counts and counts.source_tokens,
        logical_tokens=counts and counts.logical_tokens,
        loss_tokens=counts and counts.loss_tokens,
        chosen_loss_tokens=counts and counts.chosen_loss_tokens,
        rejected_loss_tokens=counts and counts.rejected_loss_tokens,
        flops=_float(counts and counts.flops),
        loss_sum=float(outcome.losses[own].sum()),
        wins=int((chosen > rejected).sum()),
        ties=int((chosen == rejected).sum()),
        chosen_reward_sum=float(chosen.sum()),
        rejected_reward_sum=float(rejected.sum()),
    )


def _pair_rows(work: Work, step: int, indices: Sequence[int], outcome: Outcome) -> tuple[PairRow, ...]:
    table, compared = work.plan.table, work.config.objective.reads_reference
    seen = dict(zip(work.plan.pairs_of(step).tolist(), work.plan.occurrence(step).tolist(), strict=True))
    return tuple(
        PairRow(
            dataset=table.datasets[table.dataset[i]],
            shard=int(table.shard[i]),
            row=int(table.row[i]),
            pair_id=table.pair_id[i].as_py(),
            occurrence=seen[i],
            policy_chosen_logp=float(outcome.policy_chosen[k]),
            policy_rejected_logp=float(outcome.policy_rejected[k]),
            reference_chosen_logp=float(work.reference[0, i]) if compared else None,
            reference_rejected_logp=float(work.reference[1, i]) if compared else None,
            loss=float(outcome.losses[k]),
        )
        for k, i in enumerate(indices)
    )


def _float(value: int | None) -> float | None:
    return None if value is None else float(value)
