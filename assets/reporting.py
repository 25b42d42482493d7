"""What an asset tells Dagster, in types that survive strict JSON.

Dagster stores a NaN as it is (its event is then no JSON), refuses numpy scalars, and JavaScript rounds integers beyond
2^53. `portable` turns each into something every reader agrees on: a plain number where that is exact, text otherwise.
"""

import math
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from typing import Any

import dagster as dg
import numpy as np
import pyarrow as pa

from training.errors import PairLedgerError

EXACT = 2**53
"""Beyond this a JSON number loses digits in the browser."""


def portable(values: Mapping[str, Any]) -> dict[str, Any]:
    """Metadata of plain, finite, exactly shown values; None is left out, Dagster's own metadata values pass."""
    return {key: _plain(value) for key, value in values.items() if value is not None}


def _plain(value: Any) -> Any:
    if isinstance(value, dg.MetadataValue | dg.TableSchema):  # these are tuples, too
        return value
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else ("Infinity" if value > 0 else "-Infinity")
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) > EXACT:
        return str(value)
    if isinstance(value, Mapping):
        return {str(key): _plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple | set | np.ndarray):
        return [_plain(inner) for inner in value]
    return value


def column_schema(schema: pa.Schema) -> dg.TableSchema:
    """An Arrow schema as Dagster shows it on the asset's page."""
    return dg.TableSchema(columns=[dg.TableColumn(name=column.name, type=str(column.type)) for column in schema])


def markdown_table(columns: list[str], rows: list[tuple[Any, ...]]) -> dg.MarkdownMetadataValue:
    """Rows of a query as a Markdown table; None is an empty cell and a float has four digits."""

    def cell(value: Any) -> str:
        if value is None:
            return ""
        return f"{value:.4g}" if isinstance(value, float) else str(value).replace("|", "\\|")

    lines = [columns, ["---"] * len(columns), *[[cell(value) for value in row] for row in rows]]
    return dg.MetadataValue.md("\n".join("| " + " | ".join(line) + " |" for line in lines))


@contextmanager
def plainly() -> Generator[None, None, None]:
    """Turn a fault that a person can mend into Dagster's own failure: its sentence, no stack, no retry."""
    try:
        yield
    except PairLedgerError as error:
        raise dg.Failure(description=str(error), allow_retries=False) from None
