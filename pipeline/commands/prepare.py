"""`pairledger prepare`: preference files to a tokenized dataset."""

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pipeline.console import console, emit, escaped, facts, progress, table
from training.errors import ConfigError

HELP = "preference files → tokenized shards with provenance and a quarantine"
ABOUT = """Read preference files of any usual format, render and tokenize them, and write a dataset: Arrow shards,
manifest.json, and quarantine.jsonl with every row that was not let in and why. The same input gives the same bytes; a
dataset that is already there is verified and reused."""
EXAMPLE = """  pairledger prepare data/*.jsonl --tokenizer models/qwen3 --out prepared/mine --max-tokens 4096
  pairledger prepare votes.csv --tokenizer models/qwen3 --out prepared/votes --map prompt=question --map chosen=best"""


def arguments(parser: argparse.ArgumentParser) -> None:
    """The command's arguments."""
    parser.add_argument(
        "inputs", nargs="+", metavar="INPUT", help="file, glob, folder, fsspec URL or hf://name@revision"
    )
    parser.add_argument("--tokenizer", required=True, metavar="DIR", help="folder with tokenizer.json")
    parser.add_argument("--out", required=True, metavar="DIR", help="folder the dataset is written to")
    parser.add_argument(
        "--source", metavar="NAME", help="name of the source (default: the first input's, without endings)"
    )
    parser.add_argument(
        "--format", default="auto", metavar="NAME", help="format of the rows (default: told from their columns)"
    )
    parser.add_argument(
        "--map",
        action="append",
        default=[],
        metavar="WANTED=FOUND",
        help="column that holds what the format wants; may be repeated",
    )
    parser.add_argument("--template", metavar="FILE", help="Jinja chat template in place of the tokenizer's own")
    parser.add_argument(
        "--max-tokens",
        type=int,
        default=2048,
        metavar="N",
        help="most tokens of prompt plus one completion (default: 2048)",
    )
    parser.add_argument(
        "--overflow",
        choices=("drop", "prompt_left", "completion_right"),
        default="drop",
        help="what becomes of a longer pair (default: drop)",
    )
    parser.add_argument(
        "--max-quarantine",
        type=float,
        default=0.5,
        metavar="SHARE",
        help="largest share of rows not let in (default: 0.5)",
    )
    parser.add_argument(
        "--workers",
        type=int,
        metavar="N",
        help="worker processes (default: one a core); the bytes are the same for any number",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object for machines")


def run(arguments: argparse.Namespace) -> int:
    """Prepare one source."""
    from training.config import LimitsConfig, ProjectConfig, parse
    from training.data.prepare import prepare
    from training.data.sources import SourceSpec

    limits = {name: getattr(arguments, name) for name in LimitsConfig.model_fields}
    name = arguments.source or Path(arguments.inputs[0].rstrip("/*")).name.partition(".")[0] or "source"
    with progress(f"preparing {name}", "pairs", quiet=arguments.json) as show:
        report = prepare(
            SourceSpec(
                name=name, inputs=tuple(arguments.inputs), format=arguments.format, mapping=mapping(arguments.map)
            ),
            Path(arguments.tokenizer),
            Path(arguments.out),
            template=Path(arguments.template) if arguments.template else None,
            limits=parse({"limits": limits}, ProjectConfig, where="command line").limits,
            max_quarantine=arguments.max_quarantine,
            workers=arguments.workers,
            progress=show,
        )
    if arguments.json:
        emit(report.to_json())
    else:
        _show(report.to_json(), name)
    return 0


def mapping(given: list[str]) -> dict[str, str]:
    """`WANTED=FOUND` words as a mapping.

    Raises:
        ConfigError: one is no such word.
    """
    pairs = [word.partition("=") for word in given]
    for wanted, equals, found in pairs:
        if not (wanted and equals and found):
            raise ConfigError(
                f"--map {wanted}{equals}{found}: say which column holds what, as in --map prompt=question"
            )
    return {wanted: found for wanted, _, found in pairs}


def _show(found: Mapping[str, Any], name: str) -> None:
    done = (
        "verified, nothing to do" if found["reused"] else f"{found['pairs'] / max(found['seconds'], 1e-3):,.0f} pairs/s"
    )
    console().print(
        f"[bold]{escaped(name)}[/bold]: {found['pairs']:,} pairs in {len(found['shards'])} shards, "
        f"{found['quarantined']:,} rows quarantined  [dim]{found['seconds']:.1f} s, {done}[/dim]"
    )
    facts({"path": str(found["path"]), "dataset": found["dataset"], **found["fingerprints"]})
    if found["reasons"]:
        table(
            ["reason", "rows"], sorted(found["reasons"].items()), title=f"not let in ({found['path']}/quarantine.jsonl)"
        )
