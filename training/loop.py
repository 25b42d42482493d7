"""The loop: load a step, do it, write its line, save where a save is due.

While a step computes, the next one is packed, read and copied by a thread. At its end the ranks exchange, between hosts
and once: what each counted and computed, whether it can do the next step, and whether it was told to stop. The lines of
all steps up to s are on disk before checkpoint s is. Counters come from the packs' geometry, never from the device.
"""

from __future__ import annotations

import logging
import math
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from training.config import RunConfig
from training.data.packing import pack_step
from training.data.plan import StepPlan
from training.errors import PairLedgerError, TrainingError
from training.evaluate import held_out_logps, judge_held_out
from training.geometry import Pack
from training.ledger.flops import ModelShape
from training.ledger.meter import Joined, Reading, SourceCounts, Unknown, join, measure
from training.ledger.record import PairRow, SourceRow, StepRecord
from training.ledger.validation import ValidationRow, append_validation
from training.ledger.writer import LedgerWriter
from training.model import Policy
from training.parallel.agree import attempted, raise_first
from training.parallel.device import Device, sent
from training.parallel.mesh import World
from training.reference import Floats
from training.scores import batch_of
from training.step import Microbatch, Outcome, joined, learning_rate, train_step

if TYPE_CHECKING:
    from training.data.shards import Dataset
    from training.data.tokenize import TokenizedPair

log = logging.getLogger("training")

Progress = Callable[[StepRecord, int], None]
"""Told of every step's record and of the number of the last step."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Work:
    """All that the steps of an attempt read.

    `reference` is float32[2, pairs of the plan's table]; where a `frozen` policy scores every pack, it is not read.
    """

    config: RunConfig
    run_id: str
    attempt: int
    plan: StepPlan
    datasets: Mapping[str, Dataset]
    policy: Policy
    frozen: Policy | None
    optimizer: torch.optim.Optimizer
    device: Device
    world: World
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


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Loaded:
    """A step of this rank: its packs on the host and on the device, and the pairs of every data-parallel rank.

    `pairs[dp rank][pack]` are indices of the plan's table. `digest` is of the tokens this rank's team has to share.
    """

    step: int
    packs: Sequence[Pack]
    microbatches: Sequence[Microbatch]
    pairs: Sequence[Sequence[Sequence[int]]]
    digest: int
    data_s: float


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Report:
    """What a rank tells the others at the end of a step; where another rank speaks for its pack, nothing of the step.

    `digest` and `fault` are of the next step: the tokens it read, or why it cannot do it. `save_fault` is what an
    earlier save met in the background.
    """

    outcome: Outcome | None = None
    reading: Reading | Unknown
    digest: int | None
    fault: PairLedgerError | None
    save_fault: PairLedgerError | None = None
    stop: bool = False
    late: bool = False
    """Whether the last save is too long ago by this rank's clock; the first rank's counts."""


def train(
    work: Work,
    *,
    start: int,
    writer: LedgerWriter | None,
    save: Callable[[int, float | None], None],
    save_fault: Callable[[], PairLedgerError | None] = lambda: None,
    stop: Callable[[], bool],
    progress: Progress | None,
) -> tuple[int, StepRecord | None]:
    """Do steps `start` to the last; gives the number of the last one that was done and saved, and its record.

    `stop` is asked after every step: where it says yes on any rank, the step is saved and the loop ends. Only the rank
    that leads has a writer and makes records. `save` is told the loss of held-out pairs where they were judged;
    `save_fault` says what an earlier save met in the background.

    Raises:
        TrainingError: as `train_step`, naming the step.
        PairLedgerError: what a rank met when it loaded a step; the same on every rank.
    """
    save_s, record, total, step, saved_at = 0.0, None, work.total, start - 1, time.monotonic()
    if step == total:
        return step, None
    with ThreadPoolExecutor(1, thread_name_prefix="load") as loader:
        loaded, fault = attempted(lambda: load(work, start))
        _check(work.world.gather(Report(reading=Reading(), digest=loaded and loaded.digest, fault=fault)), work.world)
        for step in range(start, total + 1):
            assert loaded is not None and loaded.step == step
            ahead = loader.submit(attempted, partial(load, work, step + 1)) if step < total else None
            outcome = _stepped(work, loaded)
            following, fault = ahead.result() if ahead else (None, None)
            speaks = work.world.team_rank == 0
            report = Report(
                outcome=outcome if speaks else None,
                reading=_measured(work, loaded) if speaks else Reading(),
                digest=following and following.digest,
                fault=fault,
                save_fault=save_fault(),
                stop=stop(),
                late=_minutes_since(saved_at) >= (work.config.save.minutes or math.inf),
            )
            reports = work.world.gather(report)
            if writer:
                record = _record(work, loaded, reports, save_s=save_s)
                writer.append(record)
                _log(record, total)
                if progress:
                    progress(record, total)
            judged: float | None = None
            if (often := work.config.save.validate_steps) and (step == total or step % often == 0):
                judged = _validate(work, step, writer)
            stopping, save_s, loaded = any(report.stop for report in reports), 0.0, following
            if stopping or reports[0].late or due(work, step):
                began = time.perf_counter()
                save(step, judged)
                save_s, saved_at = time.perf_counter() - began, time.monotonic()
            raise_first([report.save_fault for report in reports])  # after the save: a stop loses nothing by it
            if stopping:
                break
            _check(reports, work.world)
    return step, record


def due(work: Work, step: int) -> bool:
    """Whether the plan alone has this step saved: by its number, as the end of an epoch, or as the last."""
    every, plan = work.config.save.steps, work.plan
    ends_epoch = step == work.total or plan.epoch_of(step + 1) != plan.epoch_of(step)
    return ends_epoch or bool(every and step % every == 0)


def _minutes_since(moment: float) -> float:
    return (time.monotonic() - moment) / 60


def _check(reports: Sequence[Report], world: World) -> None:
    """Go on only where no rank has a fault and teams have read the same tokens."""
    raise_first([report.fault for report in reports])
    for rank, theirs in enumerate(reports):
        first = rank - rank % world.topology.sp
        if theirs.digest != reports[first].digest:
            raise TrainingError(
                f"ranks {first} and {rank} share packs, but read other tokens for the next step (digests "
                f"{reports[first].digest} and {theirs.digest}); every rank must read the same files"
            )


def _stepped(work: Work, loaded: Loaded) -> Outcome:
    try:
        return train_step(
            work.policy,
            work.optimizer,
            loaded.microbatches,
            frozen=work.frozen,
            pairs=len(work.plan.pairs_of(loaded.step)),
            rate=learning_rate(loaded.step, work.total, work.config.optimizer),
            config=work.config,
            device=work.device,
            world=work.world,
        )
    except TrainingError as error:
        raise TrainingError(f"step {loaded.step}: {error}") from None


def _validate(work: Work, step: int, writer: LedgerWriter | None) -> float | None:
    """Judge the held-out pairs, on all ranks; the one that leads writes them down by source and gets their loss."""
    logps = held_out_logps(
        work.policy,
        work.plan,
        work.datasets,
        layout=work.config.plan.layout,
        precision=work.config.model.dtype,
        device=work.device,
        room=work.pack_tokens,
        world=work.world,
    )
    if not writer:
        return None
    judged = judge_held_out(logps, work.plan, work.reference, work.config.objective)
    everything = judged.pop("")
    log.info(
        "step %d held out: loss %.4f  accuracy %.4f  margin %.4f",
        *(step, everything.loss_sum / everything.pairs, everything.accuracy, everything.margin),
    )
    rows = [ValidationRow(step=step, source=name, **_known(asdict(found))) for name, found in judged.items()]
    append_validation(writer.path.parent, rows)
    loss = everything.loss_sum / everything.pairs
    return loss if math.isfinite(loss) else None


def _known(sums: dict[str, Any]) -> dict[str, Any]:
    """Sums that are not finite are unknown."""
    return {name: value if math.isfinite(value) else None for name, value in sums.items()}


def load(work: Work, step: int) -> Loaded:
    """Pack a step, read this rank's pairs and put them on the device."""
    began = time.perf_counter()
    plan, world = work.config.plan, work.world
    packed = pack_step(
        work.plan,
        step,
        topology=world.topology,
        pack_tokens=work.pack_tokens,
        layout=plan.layout,
        buckets=plan.buckets,
    )
    packs: list[Pack] = []
    microbatches: list[Microbatch] = []
    digest = 0
    for members, length in zip(packed.ranks[world.dp_rank], packed.lengths[world.dp_rank], strict=True):
        pairs = [work.take(i) for i in members]
        for pair in pairs:
            digest = zlib.crc32(np.array([*pair.prompt_ids, *pair.chosen_ids, *pair.rejected_ids]).tobytes(), digest)
        pack, batch = batch_of(pairs, layout=plan.layout, device=work.device.torch, length=length, world=world)
        tokens = np.array(batch.rows_by_side, np.float32).reshape(-1, 2).T
        scores = torch.from_numpy(work.reference[:, list(members)])
        packs.append(pack)
        microbatches.append(
            Microbatch(
                batch=batch,
                reference=None if work.frozen else sent(scores, work.device.torch),
                tokens=sent(torch.from_numpy(tokens.copy()), work.device.torch),
            )
        )
    return Loaded(
        step=step,
        packs=packs,
        microbatches=microbatches,
        pairs=packed.ranks,
        digest=digest,
        data_s=time.perf_counter() - began,
    )


def _measured(work: Work, loaded: Loaded) -> Reading | Unknown:
    table = work.plan.table
    sources = [[table.sources[table.source[i]] for i in members] for members in loaded.pairs[work.world.dp_rank]]
    return measure(loaded.packs, sources, pack_tokens=work.pack_tokens, model=work.shape)


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


def _record(work: Work, loaded: Loaded, reports: Sequence[Report], *, save_s: float) -> StepRecord:
    """A step's record; `save_s` is the time spent saving since the last one."""
    outcome = joined([report.outcome for report in reports if report.outcome is not None])
    reading = join([report.reading for report in reports])
    indices = [i for packs in loaded.pairs for members in packs for i in members]
    table = work.plan.table
    return StepRecord(
        run_id=work.run_id,
        attempt=work.attempt,
        step=loaded.step,
        epoch=work.plan.epoch_of(loaded.step),
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
        data_s=loaded.data_s,
        compute_s=outcome.compute_s,
        optimizer_s=outcome.optimizer_s,
        save_s=save_s,
        sources=_source_rows(reading, outcome, [table.sources[table.source[i]] for i in indices]),
        pairs=_pair_rows(work, loaded.step, indices, outcome),
    )


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
            reference_chosen_logp=float(outcome.reference_chosen[k]) if compared else None,
            reference_rejected_logp=float(outcome.reference_rejected[k]) if compared else None,
            loss=float(outcome.losses[k]),
        )
        for k, i in enumerate(indices)
    )


def _float(value: int | None) -> float | None:
    return None if value is None else float(value)
