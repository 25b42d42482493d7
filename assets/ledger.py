"""The account: every run's steps in DuckDB, joined to the data they came from, and what it says at a glance."""

import base64
from functools import partial
from typing import Any

import dagster as dg

from assets import pictures
from assets.reporting import markdown_table, plainly, portable
from assets.store import ShardStore, TokenLedger
from training.data.fingerprint import fp
from training.errors import LedgerError
from training.ledger.charts import Picture, png
from training.ledger.pictures import pictures as report

OWNERS = ["team:pairledger"]
SMALL = 90
"""Dots an inch of a picture on an asset's page."""

COUNTS = """
select 'run' as name, count(*) from run union all select 'attempt', count(*) from attempt
union all select 'step', count(*) from current_step union all select 'step_pair', count(*) from current_step_pair
union all select 'dataset', count(*) from dataset union all select 'pair', count(*) from pair
union all select 'quarantine', count(*) from quarantine
"""
LOADED = "select path, bytes, digest from loaded order by path"
RUNS = """
select run_id, partition, outcome, attempts, steps, planned_steps, unknown_steps, pairs, pack_fill, source_fill,
    loss_density, sharing, accuracy, last_loss, source_tokens_per_s
from run_summary order by created_at desc limit 20
"""
SOURCES = """
select run_id, source, pairs, source_tokens, loss_tokens, loss_density, sharing, share_of_source_tokens, accuracy,
    margin
from source_density order by run_id, source limit 60
"""
TOTALS = """
select count(*) as steps, sum(pairs)::bigint as pairs, sum(source_tokens)::bigint as source_tokens,
    sum(loss_tokens)::bigint as loss_tokens, sum(source_tokens) / nullif(sum(window_tokens), 0) as pack_fill,
    sum(loss_tokens) / nullif(sum(source_tokens), 0) as loss_density,
    count(*) filter (pairs is null) as unknown_steps
from current_step
"""
FILL = """
select run_id, step, pack_fill from step_rates
where run_id in (select run_id from run order by created_at desc limit 5) order by run_id, step
"""
NEWEST = "select run_id from run_summary where steps > 0 order by created_at desc, run_id limit 1"


@plainly()
def token_ledger(store: ShardStore, ledger: TokenLedger) -> dg.MaterializeResult:
    """Steps, pairs and sources in DuckDB, loaded from what runs and preparation wrote; it can be lost and rebuilt."""
    report = ledger.load()
    _, loaded = ledger.query(LOADED)
    counts = dict(ledger.query(COUNTS)[1])
    return dg.MaterializeResult(
        data_version=dg.DataVersion(fp("ledger", [list(row) for row in loaded])),
        metadata=portable(
            {
                "path": store.name(report.snapshot),
                "files_read": report.files,
                "rows_added": report.rows,
                "dagster/row_count": counts["step"],
                **{f"rows/{name}": count for name, count in counts.items()},
                "cut_lines": _sentences(report.cut),
                "repeated_steps": _sentences(report.repeated),
                "missing_datasets": _sentences(report.missing),
            }
        ),
    )


@plainly()
def fill_report(ledger: TokenLedger) -> dg.MaterializeResult:
    """How full packs were, and how much of what was computed was learned from, by run and source.

    The newest run's pictures are those of `pairledger report`.
    """
    columns, rows = ledger.query(TOTALS)
    totals = dict(zip(columns, rows[0], strict=True))
    if not totals["steps"]:
        raise LedgerError("no run has recorded a step yet, so there is nothing to report; train first, then load")
    runs, sources = ledger.query(RUNS), ledger.query(SOURCES)
    ((newest,),) = ledger.query(NEWEST)[1]
    return dg.MaterializeResult(
        data_version=dg.DataVersion(fp("report", [[str(value) for value in row] for row in (*runs[1], *sources[1])])),
        metadata=portable(
            {
                **totals,
                "dagster/row_count": len(runs[1]),
                "runs": markdown_table(*runs),
                "sources": markdown_table(*sources),
                "fill": _fill(ledger.query(FILL)[1]),
                "newest_run": newest,
                **{f"newest_run/{name}": _embedded(picture) for name, picture in report(ledger.root, newest).items()},
            }
        ),
    )


def _fill(rows: list[tuple[Any, ...]]) -> dg.MarkdownMetadataValue:
    names = dict.fromkeys(run_id for run_id, _, _ in rows)
    own = {name: [(step, fill) for run_id, step, fill in rows if run_id == name] for name in names}
    series = {
        name: ([s for s, _ in points], [float("nan") if f is None else f for _, f in points])
        for name, points in own.items()
    }
    return pictures.lines("pack fill by step, newest runs", series, x="step", y="share of tokens")


def _embedded(picture: Picture) -> dg.MarkdownMetadataValue:
    data = base64.b64encode(png(picture, SMALL)).decode()
    return dg.MetadataValue.md(
        f"![{picture.title}](data:image/png;base64,{data})\n\n{picture.title}. {picture.caption}"
    )


def _sentences(lines: list[str]) -> dg.MarkdownMetadataValue | None:
    return dg.MetadataValue.md("\n".join(f"- {line}" for line in lines)) if lines else None


def assets() -> list[dg.AssetsDefinition]:
    """The group `ledger`; one writer at a time, and reading waits for nobody."""
    account = partial(dg.asset, group_name="ledger", owners=OWNERS, kinds={"duckdb"}, code_version="1")
    return [
        account(deps=["dpo_run", "preference_shards"], pool="ledger_writer")(token_ledger),
        account(deps=["token_ledger"])(fill_report),
    ]
