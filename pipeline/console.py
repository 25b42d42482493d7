"""What a person reads: tables, numbers, progress. Machines get JSON from the commands themselves.

rich is imported where it is used: it costs 0.1 s, and help must show at once.
"""

import json
import math
import sys
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console

SHARES = {"pack_fill", "source_fill", "loss_density", "loss_fill", "sharing", "accuracy"}
"""Columns that are shares; they are shown as per cent."""


def console(*, stderr: bool = False) -> "Console":
    """A console that does not colour or break numbers, and leaves lines of a pipe whole."""
    from rich.console import Console

    stream = sys.stderr if stderr else sys.stdout
    return Console(
        stderr=stderr, highlight=False, soft_wrap=not stream.isatty(), width=None if stream.isatty() else 200
    )


def table(columns: Sequence[str], rows: Iterable[Sequence[Any]], *, title: str | None = None) -> None:
    """Print rows under their columns; numbers stand right, shares as per cent, what is unknown as a dash."""
    from rich import box
    from rich.table import Table

    rows = [list(row) for row in rows]
    shown = Table(title=title, box=box.SIMPLE_HEAD, title_justify="left", title_style="bold", pad_edge=False)
    for i, name in enumerate(columns):
        numeric = any(isinstance(row[i], int | float) for row in rows)
        shown.add_column(name, justify="right" if numeric else "left", overflow="fold")
    for row in rows:
        shown.add_row(*(cell(value, name) for name, value in zip(columns, row, strict=True)))
    console().print(shown)


def cell(value: Any, name: str = "") -> str:
    """One value as a person reads it."""
    if value is None:
        return "–"
    if isinstance(value, float):
        if (name in SHARES or name.startswith("share_of_")) and math.isfinite(value):
            return f"{100 * value:.1f} %"
        return f"{value:.4g}"
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    return escaped(str(value))


def escaped(text: str) -> str:
    """Text of others, so that rich reads no markup in it."""
    from rich.markup import escape

    return escape(text)


def facts(values: Mapping[str, Any]) -> None:
    """Print names and values, a line each."""
    width = max(map(len, values))
    shown = console()
    for name, value in values.items():
        shown.print(f"[dim]{name:<{width}}[/dim]  {cell(value, name)}")


def emit(values: Any) -> None:
    """Print strict JSON for a machine; what JSON has no word for is text, a number that is not finite is null."""
    print(json.dumps(_strict(values), ensure_ascii=False, allow_nan=False, default=str))


def _strict(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Mapping):
        return {str(key): _strict(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_strict(inner) for inner in value]
    return value


@contextmanager
def progress(what: str, unit: str, *, quiet: bool) -> Generator[Callable[[int, int | None], None]]:
    """A line on stderr with rate and time to the end; call it with what is done and, where known, with the total."""
    if quiet or not sys.stderr.isatty():
        yield lambda done, total: None
        return
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

    rate = TextColumn("{task.fields[rate]} " + unit + "/s")
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), rate, TimeRemainingColumn())
    with Progress(*columns, console=console(stderr=True), transient=True) as bar:
        task = bar.add_task(what, total=None, rate="–")

        def show(done: int, total: int | None) -> None:
            elapsed = bar.tasks[0].elapsed or 0
            bar.update(task, completed=done, total=total, rate=f"{done / elapsed:,.0f}" if elapsed > 0.2 else "–")

        yield show
