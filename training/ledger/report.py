"""A run's token report: one HTML page that needs nothing but a browser.

Numbers come from the views of the newest published database, pictures are embedded, and the page loads nothing from
anywhere. Steps whose counters are unknown are gaps in the lines, and counted on top.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape
from pathlib import Path
from typing import Any

from training.errors import LedgerError
from training.ledger.page import STYLE, amount, cards, figure, listed, seconds, share, table
from training.ledger.pictures import pictures
from training.ledger.reconcile import SHOWN, Difference, reconcile
from training.ledger.store import query

SOURCES = """
select source, pairs, source_tokens, share_of_source_tokens, loss_tokens, share_of_loss_tokens, loss_density, sharing,
    c.flops, accuracy, mean_loss, margin, unknown_steps
from source_density
left join (select run_id, source, sum(flops) as flops from current_step_source group by all) as c using (run_id, source)
where run_id = ? order by source_tokens desc nulls last, source
"""
WASTE = """
select
    'attempt ' || w.attempt || ' ' || coalesce(a.outcome, 'was killed') as cause, count(*) as steps,
    min(w.step) as first_step, max(w.step) as last_step, sum(w.physical_tokens)::bigint as tokens,
    sum(w.seconds) as seconds, sum(w.flops) as flops
from waste as w
join attempt as a using (run_id, attempt)
where run_id = ?
group by w.attempt, a.outcome
order by w.attempt
"""
SLOWEST = """
with timed as (
    select *, data_s + compute_s + optimizer_s as seconds from current_step where run_id = ? and seconds is not null
)
select step, seconds, seconds / (select median(seconds) from timed) as times_the_median, data_s, compute_s, optimizer_s,
    physical_tokens, packs, max_document_tokens
from timed order by seconds desc, step limit 8
"""
PLAN = """
select
    counter, sum(predicted)::bigint as predicted_before_the_run, sum(actual)::bigint as found_in_the_ledger,
    sum(difference)::bigint as difference, count(*) filter (status = 'equal') as steps_equal,
    count(*) filter (status <> 'equal') as steps_not_equal
from plan_vs_actual
where run_id = ?
    and counter in ('pairs', 'documents', 'source_tokens', 'logical_tokens', 'loss_tokens', 'window_tokens')
group by counter
order by counter
"""
WRONG = """
select
    source, locator, arg_max(margin, step) as last_margin, min_by(margin, step) as first_margin, count(*) as times_seen,
    any_value(prompt_tokens) as prompt_tokens, any_value(chosen_tokens) as chosen_tokens,
    any_value(rejected_tokens) as rejected_tokens
from pair_history
where run_id = ?
group by dataset, shard, "row", source, locator
having last_margin < 0
order by last_margin, locator limit 8
"""
ATTEMPTS = """
select attempt, outcome, from_step, started_at, ended_at, device,
    concat_ws(' × ', dp_replicate, dp_shard, cp, ulysses) as "replicate × shard × cp × ulysses", pack_tokens,
    dagster_run_id, gap
from attempt where run_id = ? order by attempt
"""
DATASETS = """
select
    d.dataset, d.path, d.pairs, d.quarantined,
    (select count(*) from unconsumed as u where u.run_id = run_dataset.run_id and u.dataset = d.dataset)
        as not_learned_from,
    d.tokenizer, d.template, d.recipe
from run_dataset
join dataset as d using (dataset)
where run_id = ?
order by d.path
"""


def write_report(store_root: str | Path, run_id: str, out: str | Path) -> Path:
    """Write the run's report page.

    Raises:
        LedgerError: the run is not loaded, has no step that counts, or the page cannot be written.
    """
    page = "\n".join(_page(store_root, run_id))
    path = Path(out)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(page, encoding="utf-8")
    except OSError as error:
        raise LedgerError(f"{path}: cannot be written: {error.strerror}") from None
    return path


def _page(store_root: str | Path, run_id: str) -> Iterator[str]:
    differences, shown = reconcile(store_root, run_id), pictures(store_root, run_id)
    columns, rows = query(store_root, "select * from run_summary where run_id = ?", [run_id])
    run: dict[str, Any] = dict(zip(columns, rows[0], strict=True))
    plan, wrong, waste, datasets = (query(store_root, sql, [run_id]) for sql in (PLAN, WRONG, WASTE, DATASETS))
    yield '<!doctype html><html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width">'
    yield f"<title>Token report of {escape(run_id)}</title><style>{STYLE}</style>"
    yield f"<header><h1>Token report <small>{escape(run_id)}</small></h1><p class=soft>{_about(run)}</p></header>"
    yield _verdict(differences)
    yield _numbers(run)
    yield '<div class="grid">' + "".join(figure(name, picture) for name, picture in shown.items()) + "</div>"
    yield '<h2 id="sources">Sources</h2>' + table(query(store_root, SOURCES, [run_id]))
    yield '<h2 id="plan">Predicted and found</h2>' + (table(plan) if plan[1] else "<p>Nothing was predicted.</p>")
    yield '<h2 id="wrong">Pairs judged wrongly when last seen, the worst first</h2>'
    yield table(wrong) if wrong[1] else "<p>None.</p>"
    yield '<h2 id="thrown-away">Work that was thrown away</h2>' + (table(waste) if waste[1] else "<p>None.</p>")
    yield '<h2 id="slowest">Slowest steps</h2>' + table(query(store_root, SLOWEST, [run_id]))
    yield '<h2 id="attempts">Attempts</h2>' + table(query(store_root, ATTEMPTS, [run_id]))
    yield '<h2 id="datasets">Datasets</h2>' + (table(datasets) if datasets[1] else "<p>None is loaded.</p>")
    yield "</html>"


def _about(run: dict[str, Any]) -> str:
    parts = [
        f"partition {run['partition']}" if run["partition"] else "",
        f"{run['layout']} layout",
        f"begun {run['started_at']:%Y-%m-%d %H:%M} UTC" if run["started_at"] else "",
        run["outcome"] or "running, or killed",
    ]
    return escape(" · ".join(filter(None, parts)))


def _verdict(differences: Sequence[Difference]) -> str:
    if not differences:
        return '<p class="verdict">Plan, ledger and manifests agree, to the token.</p>'
    more = [f"and {len(differences) - SHOWN} more"] if len(differences) > SHOWN else []
    shown = listed([*map(str, differences[:SHOWN]), *more])
    head = f"Plan, ledger and manifests differ in {len(differences)} places:"
    return f'<div class="verdict bad"><span>{head}</span>{shown}</div>'


def _numbers(run: dict[str, Any]) -> str:
    planned = run["planned_steps"]
    values = {
        "steps" if planned is None else f"steps of {planned:,} planned": amount(run["steps"]),
        "pairs": amount(run["pairs"]),
        "source tokens": amount(run["source_tokens"]),
        "supervised tokens": amount(run["loss_tokens"]),
        "pack fill": share(run["pack_fill"]),
        "loss density": share(run["loss_density"]),
        "saved by sharing prompts": share(None if run["sharing"] is None else 1 - run["sharing"]),
        "accuracy over all steps": share(run["accuracy"]),
        "loss of the last step": amount(run["last_loss"]),
        "source tokens a second": amount(run["source_tokens_per_s"]),
        "in steps": seconds(run["seconds"]),
        "in steps thrown away": seconds(run["wasted_seconds"] or 0.0),
    }
    if run["mfu"] is not None:
        values["model FLOPs utilization"] = share(run["mfu"])
    if run["unknown_steps"]:
        values["steps with unknown counters"] = amount(run["unknown_steps"])
    if run["nonfinite_steps"]:
        values[f"non-finite steps, first {run['first_nonfinite_step']:,}"] = amount(run["nonfinite_steps"])
    return cards(values)
