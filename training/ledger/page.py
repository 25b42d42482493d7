"""The pieces of an HTML page that needs nothing but a browser: cards, tables, pictures as data."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from datetime import datetime
from html import escape
from typing import Any

from training.ledger.charts import Picture, png, short

Answer = tuple[list[str], list[tuple[Any, ...]]]

STYLE = """
:root { --ink: #23272e; --soft: #68707c; --line: #e3e6ea; --good: #2e7d4f; --bad: #b3261e; --room: #f6f7f9 }
* { box-sizing: border-box }
body { font: 15px/1.5 system-ui, "Segoe UI", Roboto, sans-serif; color: var(--ink); background: #fff;
  margin: 0 auto; max-width: 84rem; padding: 2rem 1.5rem 4rem }
header { border-bottom: 1px solid var(--line); margin-bottom: 1.4rem }
h1 { font-size: 1.6rem; margin: 0 } h1 small { color: var(--soft); font-weight: 400; font-size: 1rem }
h2 { font-size: 1.15rem; margin: 2.4rem 0 .6rem } p { margin: .2rem 0 .8rem } .soft { color: var(--soft) }
.verdict { border-left: 4px solid var(--good); background: var(--room); padding: .6rem 1rem; margin: 1rem 0 }
.verdict.bad { border-color: var(--bad); color: var(--bad) } .verdict ul { margin: .3rem 0; padding-left: 1.2rem }
.cards { display: grid; grid-template-columns: repeat(auto-fill, minmax(10rem, 1fr)); gap: .7rem; margin: 1.2rem 0 }
.card { background: var(--room); border-radius: 6px; padding: .7rem .9rem }
.card b { display: block; white-space: nowrap; font-size: 1.4rem;
  font-weight: 600; font-variant-numeric: tabular-nums; line-height: 1.25 }
.card span { color: var(--soft); font-size: .85rem }
.grid { display: grid; grid-template-columns: repeat(auto-fit, minmax(26rem, 1fr)); gap: 1.4rem 2rem }
figure { margin: 0 } figure img { width: 100%; height: auto; display: block }
figcaption { color: var(--soft); font-size: .87rem } figure h3 { font-size: 1rem; margin: 0 0 .2rem }
.wide { overflow-x: auto } table { border-collapse: collapse; font-size: .9rem }
th { text-align: left; color: var(--soft); font-weight: 500; vertical-align: bottom; line-height: 1.25 }
th, td { padding: .3rem 1.1rem .3rem 0; border-bottom: 1px solid var(--line) } td { white-space: nowrap }
td.n, th.n { text-align: right; font-variant-numeric: tabular-nums }
td i { display: inline-block; height: .6rem; background: #2f5d8a; border-radius: 2px; margin-right: .4rem }
@media print { body { max-width: none } figure, .card { break-inside: avoid } }
"""
SHARES = ("pack_fill", "source_fill", "loss_density", "loss_fill", "sharing", "accuracy", "mfu")


def is_share(name: str) -> bool:
    """Whether a column is shown as per cent."""
    return name in SHARES or name.startswith("share") or name.endswith("share")


def cards(values: Mapping[str, str]) -> str:
    """Numbers to be seen at once, by what they are."""
    shown = (
        f'<div class="card"><b>{escape(value)}</b><span>{escape(name)}</span></div>' for name, value in values.items()
    )
    return f'<div class="cards">{"".join(shown)}</div>'


def figure(name: str, picture: Picture) -> str:
    """A picture with its title and caption; `name` is its anchor."""
    data, title = base64.b64encode(png(picture)).decode(), escape(picture.title)
    return (
        f'<figure id="{escape(name)}"><h3>{title}</h3><img alt="{title}" src="data:image/png;base64,{data}">'
        f"<figcaption>{escape(picture.caption)}</figcaption></figure>"
    )


def table(answer: Answer) -> str:
    """Rows under their columns; numbers stand right, shares have a bar."""
    columns, rows = answer
    numeric = [any(isinstance(row[place], int | float) for row in rows) for place in range(len(columns))]
    head = "".join(
        f"<th{_right(right)}>{escape(name.replace('_', ' '))}</th>"
        for name, right in zip(columns, numeric, strict=True)
    )
    body = "".join(
        "<tr>"
        + "".join(
            f"<td{_right(right)}>{_bar(value, name)}{cell(value, name)}</td>"
            for name, value, right in zip(columns, row, numeric, strict=True)
        )
        + "</tr>"
        for row in rows
    )
    return f'<div class="wide"><table><tr>{head}</tr>{body}</table></div>'


def cell(value: Any, name: str = "") -> str:
    """A value as a person reads it; what is not known is a dash."""
    if value is None:
        return "–"
    if name.endswith("flops"):
        return short(value)
    if isinstance(value, float):
        return f"{value:.1%}" if is_share(name) else f"{value:,.0f}" if abs(value) >= 1e4 else f"{value:,.4g}"
    if isinstance(value, datetime):
        return f"{value:%Y-%m-%d %H:%M:%S}"
    return f"{value:,}" if isinstance(value, int) else escape(str(value))


def amount(value: float | None) -> str:
    """A number for a card."""
    return "–" if value is None else short(value)


def share(value: float | None) -> str:
    """A share for a card."""
    return "–" if value is None else f"{value:.1%}"


def seconds(value: float | None) -> str:
    """A time for a card: 45 s, 3 min 20 s, 2 h 5 min."""
    if value is None:
        return "–"
    whole = round(value)
    if whole < 60:
        return f"{value:.3g} s"
    return f"{whole // 60} min {whole % 60} s" if whole < 3600 else f"{whole // 3600} h {whole % 3600 // 60} min"


def listed(sentences: Sequence[str]) -> str:
    """Sentences as a list."""
    return "<ul>" + "".join(f"<li>{escape(sentence)}</li>" for sentence in sentences) + "</ul>"


def _right(numeric: bool) -> str:
    return ' class="n"' if numeric else ""


def _bar(value: Any, name: str) -> str:
    return f'<i style="width:{3 * min(max(value, 0), 1):.2f}rem"></i>' if name.startswith("share") and value else ""
