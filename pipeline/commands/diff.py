"""`pairledger diff`: what is different between two prepared datasets, and which input made it so."""

import argparse
from pathlib import Path
from typing import Any

from pipeline.console import console, emit, escaped, table

HELP = "what differs between two datasets, and which input made it so"
ABOUT = """Compare two datasets by content: which of source, tokenizer, template and recipe differ, which pairs only one
of them holds, and which pairs both hold with other tokens. Where they lie and how they are cut into shards is no
difference."""
EXAMPLE = """  pairledger diff prepared/monday prepared/tuesday"""

SHOWN = 10


def arguments(parser: argparse.ArgumentParser) -> None:
    """The command's arguments."""
    parser.add_argument("a", metavar="A", help="folder of a prepared dataset")
    parser.add_argument("b", metavar="B", help="folder of another")
    parser.add_argument("--json", action="store_true", help="print one JSON object for machines")


def run(arguments: argparse.Namespace) -> int:
    """Compare; equal or not, the exit code is 0."""
    found = compare(Path(arguments.a), Path(arguments.b))
    if arguments.json:
        emit(found)
    else:
        _show(found)
    return 0


def compare(a: Path, b: Path) -> dict[str, Any]:
    """What two datasets differ in. Costs both datasets' columns in memory."""
    from training.data.shards import open_dataset

    one, other = open_dataset(a), open_dataset(b)
    names = sorted({*one.inputs, *other.inputs})
    inputs = {name: [one.inputs.get(name), other.inputs.get(name)] for name in names}
    rows = [_rows(dataset) for dataset in (one, other)]
    both = rows[0].keys() & rows[1].keys()
    return {
        "equal": one.fingerprint == other.fingerprint,
        "datasets": [one.fingerprint, other.fingerprint],
        "inputs_that_differ": {name: pair for name, pair in inputs.items() if pair[0] != pair[1]},
        "pairs": [len(one.columns().prompt), len(other.columns().prompt)],
        "only_in_a": sorted(rows[0].keys() - both),
        "only_in_b": sorted(rows[1].keys() - both),
        "other_tokens": sorted(name for name in both if not _same(one, rows[0][name], other, rows[1][name])),
    }


def _rows(dataset: Any) -> dict[str, tuple[int, int]]:
    columns = dataset.columns()
    places = zip(columns.shard.tolist(), columns.row.tolist(), strict=True)
    return dict(zip(columns.pair_id.to_pylist(), places, strict=True))


def _same(one: Any, a: tuple[int, int], other: Any, b: tuple[int, int]) -> bool:
    tokens = ("prompt_ids", "chosen_ids", "rejected_ids", "chosen_mask", "rejected_mask")
    mine, theirs = one.take(*a), other.take(*b)
    return all(getattr(mine, name) == getattr(theirs, name) for name in tokens)


def _show(found: dict[str, Any]) -> None:
    shown = console()
    if found["equal"]:
        shown.print(f"equal: {found['datasets'][0]}")
        return
    differ = [[name, *map(str, pair)] for name, pair in found["inputs_that_differ"].items()]
    table(["", "A", "B"], [["dataset", *found["datasets"]], ["pairs", *map(str, found["pairs"])], *differ])
    for name, words in (
        ("only_in_a", "only in A"),
        ("only_in_b", "only in B"),
        ("other_tokens", "same pair, other tokens"),
    ):
        pairs = found[name]
        if pairs:
            more = f", and {len(pairs) - SHOWN:,} more" if len(pairs) > SHOWN else ""
            shown.print(f"{words}: {len(pairs):,}  [dim]{escaped(', '.join(pairs[:SHOWN]))}{more}[/dim]")
