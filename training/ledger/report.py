"""A run's token report: one HTML page that needs nothing but a browser.

Numbers come from the views of the newest published database, pictures are embedded PNGs drawn without pyplot (it keeps
global state), and the page loads nothing from anywhere. Steps whose counters are unknown are gaps in the lines, and
counted in the table.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from training.errors import LedgerError
from training.ledger.reconcile import SHOWN, reconcile
from training.ledger.store import query

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SUMMARY = "select * exclude (run_id) from run_summary where run_id = ?"
STEPS = """
select step, pack_fill, source_fill, loss_density, sharing, loss, accuracy, margin, chosen_reward, rejected_reward,
    source_tokens_per_s, loss_tokens_per_s
from step_rates where run_id = ? order by step
"""
BY_SOURCE = """
select step, source, loss_tokens / nullif(source_tokens, 0) as loss_density
from current_step_source where run_id = ? order by source, step
"""
SOURCES = """
select source, steps, pairs, source_tokens, loss_tokens, loss_density, sharing, share_of_source_tokens,
    share_of_loss_tokens, accuracy, mean_loss, margin
from source_density where run_id = ? order by source
"""
WASTE = """
select attempt, voided_by, count(*) as steps, sum(source_tokens)::bigint as source_tokens, sum(seconds) as seconds
from waste where run_id = ? group by attempt, voided_by order by attempt
"""
STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 60rem; padding: 0 1rem; color: #1a1a1a }
h1 { font-size: 1.5rem } h2 { font-size: 1.15rem; margin-top: 2.2rem } img { max-width: 100% }
table { border-collapse: collapse; display: block; overflow-x: auto } th { text-align: left }
th, td { padding: .2rem .8rem .2rem 0; border-bottom: 1px solid #ddd; white-space: nowrap }
td { font-variant-numeric: tabular-nums } .bad { color: #a40000 }
"""
Answer = tuple[list[str], list[tuple[Any, ...]]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Picture:
    """One chart: a line for each named series of (steps, values); None is a gap."""

    title: str
    unit: str
    lines: Mapping[str, tuple[Sequence[int], Sequence[float | None]]]

    def png(self) -> bytes:
        """The chart as PNG."""
        from matplotlib.figure import Figure  # half a second, which loading the ledger need not spend

        figure = Figure(figsize=(9, 3), dpi=110, layout="constrained")
        axes: Axes = figure.add_subplot()
        for name, (steps, values) in self.lines.items():
            gapped = [float("nan") if value is None else value for value in values]
            axes.plot(steps, gapped, label=name, linewidth=1.3, marker="." if len(steps) < 60 else "")
        axes.locator_params(axis="x", integer=True)
        axes.set_xlabel("step")
        axes.set_ylabel(self.unit)
        axes.set_ylim(*((0, 1.05) if self.unit.startswith("share") else (None, None)))
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False, loc="best")
        buffer = io.BytesIO()
        figure.savefig(buffer, format="png", metadata={"Software": None})
        return buffer.getvalue()


def pictures(store_root: str | Path, run_id: str) -> dict[str, Picture]:
    """The report's charts by name: fill, loss_density, loss, accuracy, margin, throughput.

    Raises:
        LedgerError: the run has no step that counts.
    """
    columns, rows = query(store_root, STEPS, [run_id])
    if not rows:
        raise LedgerError(f"run {run_id} has no steps to report; train first, then load its ledger")
    by_name: dict[str, Any] = dict(zip(columns, zip(*rows, strict=True), strict=True))
    at = by_name["step"]

    def chart(title: str, unit: str, *names: str) -> Picture:
        return Picture(title=title, unit=unit, lines={name.replace("_", " "): (at, by_name[name]) for name in names})

    density: dict[str, tuple[list[int], list[float | None]]] = {"all": (at, by_name["loss_density"])}
    for step, source, value in query(store_root, BY_SOURCE, [run_id])[1]:
        steps, values = density.setdefault(f"source {source}", ([], []))
        steps.append(step)
        values.append(value)
    return {
        "fill": chart("How full the packs were", "share of tokens", "pack_fill", "source_fill", "sharing"),
        "loss_density": Picture(title="What was learned from, by source", unit="share of tokens", lines=density),
        "loss": chart("Loss", "nats a pair", "loss"),
        "accuracy": chart("Pairs told apart", "share of pairs", "accuracy"),
        "margin": chart("Rewards and their margin", "nats", "margin", "chosen_reward", "rejected_reward"),
        "throughput": chart("Throughput", "tokens a second", "source_tokens_per_s", "loss_tokens_per_s"),
    }


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
    differences, charts = reconcile(store_root, run_id), pictures(store_root, run_id)
    yield f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{escape(run_id)}</title><style>{STYLE}</style>'
    yield f"<h1>Token report of {escape(run_id)}</h1>"
    if differences:
        yield f'<p class="bad">Plan, ledger and manifests differ in {len(differences)} places:</p><ul class="bad">'
        yield from (f"<li>{escape(str(difference))}</li>" for difference in differences[:SHOWN])
        yield "</ul>"
    else:
        yield "<p>Plan, ledger and manifests agree, to the token.</p>"
    yield "<h2>Summary</h2>" + _upright(query(store_root, SUMMARY, [run_id]))
    for name, picture in charts.items():
        data = base64.b64encode(picture.png()).decode()
        yield f'<h2 id="{name}">{escape(picture.title)}</h2>'
        yield f'<img alt="{escape(picture.title)} by step" src="data:image/png;base64,{data}">'
    yield "<h2>Sources</h2>" + _table(query(store_root, SOURCES, [run_id]))
    waste = query(store_root, WASTE, [run_id])
    yield '<h2 id="waste">Work that does not count</h2>' + (_table(waste) if waste[1] else "<p>None.</p>")
    yield "</html>"


def _table(answer: Answer) -> str:
    columns, rows = answer
    head = "".join(f"<th>{escape(name.replace('_', ' '))}</th>" for name in columns)
    body = "".join("<tr>" + "".join(f"<td>{_cell(value)}</td>" for value in row) + "</tr>" for row in rows)
    return f"<table><tr>{head}</tr>{body}</table>"


def _upright(answer: Answer) -> str:
    columns, rows = answer
    lines = (
        f"<tr><th>{escape(n.replace('_', ' '))}</th><td>{_cell(v)}</td></tr>"
        for n, v in zip(columns, *rows, strict=True)
    )
    return "<table>" + "".join(lines) + "</table>"


def _cell(value: Any) -> str:
    if value is None:
        return "unknown"
    if isinstance(value, float):
        return f"{value:,.4g}" if abs(value) < 1000 else f"{value:,.0f}"
    return f"{value:,}" if isinstance(value, int) else escape(str(value))
