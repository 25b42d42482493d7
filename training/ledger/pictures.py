"""Which pictures a run's report has, and the numbers in them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from training.errors import LedgerError
from training.ledger.charts import Amounts, Lines, Parts, Picture, Series
from training.ledger.store import query

STEPS = """
select
    s.step, r.pack_fill, r.source_fill, r.loss_density, r.sharing, s.loss, r.accuracy, r.margin, r.chosen_reward,
    r.rejected_reward, r.source_tokens_per_s, r.loss_tokens_per_s, s.data_s, s.compute_s, s.optimizer_s, s.save_s
from step_rates as r
join current_step as s using (run_id, attempt, step)
where run_id = ?
order by s.step
"""
DENSITY = """
select step, source, loss_tokens / nullif(source_tokens, 0)
from current_step_source
where run_id = $run and source in (
    select source from source_density where run_id = $run order by source_tokens desc nulls last, source limit 6
)
order by source, step
"""
HELD_OUT = """
select step, sum(pairs * accuracy) / sum(pairs), sum(pairs * loss) / sum(pairs) filter (loss is not null)
from current_validation
where run_id = ?
group by step
order by step
"""
FATE = """
select
    sum(loss_tokens)::bigint, sum(source_tokens - loss_tokens)::bigint, sum(physical_tokens - source_tokens)::bigint,
    (select sum(physical_tokens)::bigint from waste where run_id = $run)
from current_step
where run_id = $run
"""


def pictures(store_root: str | Path, run_id: str) -> dict[str, Picture]:
    """The report's pictures by name: fill, loss_density, loss, accuracy, margin, throughput, time, waste.

    Raises:
        LedgerError: the run has no step that counts.
    """
    columns, rows = query(store_root, STEPS, [run_id])
    if not rows:
        raise LedgerError(f"run {run_id} has no steps to report; train first, then load its ledger")
    of: dict[str, Any] = dict(zip(columns, zip(*rows, strict=True), strict=True))
    held = [*zip(*query(store_root, HELD_OUT, [run_id])[1], strict=True)] or [(), (), ()]

    def course(*names: str) -> dict[str, Series]:
        return {name.removesuffix("_per_s").replace("_", " "): (of["step"], of[name]) for name in names}

    def judged(place: int) -> dict[str, Series]:
        return {"held-out pairs": (held[0], held[place])} if held[0] else {}

    return {
        "fill": Lines(
            title="How full the packs were",
            caption="Pack fill is of the room that was there, source fill of what was computed; sharing is what is "
            "laid out of what would be if every prompt stood there twice.",
            unit="share of tokens",
            lines=course("pack_fill", "source_fill", "sharing"),
        ),
        "loss_density": Lines(
            title="How much of each source is learned from",
            caption="Supervised tokens of all tokens of a source; the six largest.",
            unit="share of tokens",
            lines=_density(store_root, run_id, course("loss_density")["loss density"]),
        ),
        "loss": Lines(
            title="Loss",
            caption="Mean over the step's pairs. A DPO run starts at ln 2 = 0.693.",
            unit="a pair",
            lines=course("loss"),
            dots=judged(2),
        ),
        "accuracy": Lines(
            title="Pairs told apart",
            caption="Chosen side strictly above the rejected one.",
            unit="share of pairs",
            lines=course("accuracy"),
            dots=judged(1),
        ),
        "margin": Lines(
            title="Rewards and their margin",
            caption="Beta times the log ratio to the reference, mean over the step's pairs.",
            unit="nats",
            lines=course("margin", "chosen_reward", "rejected_reward"),
        ),
        "throughput": Lines(
            title="Throughput",
            caption="Metering, validation and saving are left out of the time.",
            unit="tokens a second",
            lines=course("source_tokens_per_s", "loss_tokens_per_s"),
        ),
        "time": Parts(
            title="Where a step's time goes",
            caption="Saving is what training stood still for between two steps.",
            unit="seconds",
            steps=of["step"],
            parts={
                "forward and backward": of["compute_s"],
                "optimizer": of["optimizer_s"],
                "data": of["data_s"],
                "saving": of["save_s"],
            },
        ),
        "waste": _fate(*query(store_root, FATE, {"run": run_id})[1][0]),
    }


def _density(store_root: str | Path, run_id: str, whole: Series) -> dict[str, Series]:
    found: dict[str, tuple[list[int], list[float | None]]] = {}
    for step, source, value in query(store_root, DENSITY, {"run": run_id})[1]:
        steps, values = found.setdefault(source, ([], []))
        steps.append(step)
        values.append(value)
    return {**({"all sources": whole} if len(found) > 1 else {}), **found}


def _fate(supervised: int | None, context: int | None, padding: int | None, again: int | None) -> Amounts:
    fates: Sequence[tuple[str, int | None]] = (
        ("learned from", supervised),
        ("read as context", context),
        ("padding", padding),
        ("thrown away", again),
    )
    return Amounts(
        title="What became of all computed tokens",
        caption="Thrown away is what an attempt computed and had not saved when it ended; it was made again.",
        amounts={name: float(tokens or 0) for name, tokens in fates},
    )
