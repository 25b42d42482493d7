"""`pairledger inspect`: a dataset, or one of its pairs as the model sees it."""

import argparse
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from pipeline.console import console, emit, escaped, facts, table
from training.errors import ConfigError, DatasetError, TokenizerError

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Backend

    from training.data.shards import Dataset
    from training.data.tokenize import TokenizedPair

HELP = "a dataset's account, or one pair as the model sees it"
ABOUT = """Show what a dataset holds and what it was made from; with --pair or --row, one pair token by token: prompt,
supervised and unsupervised completion tokens, ids, and the line it came from."""
EXAMPLE = """  pairledger inspect prepared/mine
  pairledger inspect prepared/mine --row 0
  pairledger inspect prepared/mine --pair pair1:5f1c…"""

STYLES = {"prompt": "cyan", "supervised": "bold green", "unsupervised": "dim strike"}


def arguments(parser: argparse.ArgumentParser) -> None:
    """The command's arguments."""
    parser.add_argument("dataset", metavar="DATASET", help="folder of a prepared dataset")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--pair", metavar="ID", help="fingerprint of a pair, or its beginning")
    which.add_argument("--row", type=int, metavar="N", help="place of a pair in the dataset, from 0")
    parser.add_argument("--ids", action="store_true", help="show each token's id right after its text")
    parser.add_argument("--json", action="store_true", help="print one JSON object for machines")


def run(arguments: argparse.Namespace) -> int:
    """Show the dataset, or the pair asked for."""
    from training.data.shards import open_dataset

    dataset = open_dataset(Path(arguments.dataset))
    if arguments.pair is None and arguments.row is None:
        _show_dataset(dataset, as_json=arguments.json)
        return 0
    row = _find(dataset, arguments.pair) if arguments.pair is not None else arguments.row
    columns = dataset.columns()
    if not 0 <= row < len(columns.prompt):
        raise ConfigError(f"--row {row}: {arguments.dataset} holds rows 0 to {len(columns.prompt) - 1}")
    pair = dataset.take(int(columns.shard[row]), int(columns.row[row]))
    if arguments.json:
        emit({"row": row, **asdict(pair)})
    else:
        _show_pair(dataset, pair, row, ids=arguments.ids)
    return 0


def _show_dataset(dataset: "Dataset", *, as_json: bool) -> None:
    manifest = dataset.manifest
    if as_json:
        emit(manifest.to_json())
        return
    facts(
        {"dataset": dataset.fingerprint, "path": str(dataset.path), "rendering": manifest.rendering, **manifest.inputs}
    )
    columns = dataset.columns()
    rows = []
    for code, source in enumerate(columns.sources):
        own = columns.source_code == code
        tokens = [int(lengths[own].sum()) for lengths in (columns.prompt, columns.chosen, columns.rejected)]
        loss = int(columns.chosen_loss[own].sum() + columns.rejected_loss[own].sum())
        rows.append([source, int(own.sum()), *tokens, loss / sum(tokens)])
    names = ["source", "pairs", "prompt tokens", "chosen tokens", "rejected tokens", "loss_density"]
    table(names, rows, title="pairs")
    if manifest.counts["quarantined"]:
        table(["reason", "rows"], sorted(manifest.counts["reasons"].items()), title="quarantined")


def _find(dataset: "Dataset", wanted: str) -> int:
    found = [i for i, name in enumerate(dataset.columns().pair_id.to_pylist()) if name.startswith(wanted)]
    if not found:
        raise DatasetError(f"{dataset.path}: holds no pair {wanted}; `pairledger inspect DATASET --row 0` shows an id")
    return found[0]


def _show_pair(dataset: "Dataset", pair: "TokenizedPair", row: int, *, ids: bool) -> None:
    from rich.text import Text

    words = _words(dataset)
    facts({"pair": pair.pair_id, "row": row, "source": pair.source, "locator": pair.locator})
    cuts = (pair.prompt_cut, pair.chosen_cut, pair.rejected_cut)
    if any(cuts):
        facts({"cut": "prompt {}, chosen {}, rejected {} tokens".format(*cuts)})
    shown = console()
    legend = "  ".join(f"[{style}]{name}[/]" for name, style in STYLES.items())
    shown.print(f"\n{legend}")
    sides = (
        ("prompt", pair.prompt_ids, ["prompt"] * len(pair.prompt_ids)),
        ("chosen", pair.chosen_ids, _styles(pair.chosen_ids, pair.chosen_mask)),
        ("rejected", pair.rejected_ids, _styles(pair.rejected_ids, pair.rejected_mask)),
    )
    for name, tokens, kinds in sides:
        supervised = kinds.count("supervised")
        shown.print(f"\n[bold]{name}[/bold]  [dim]{len(tokens)} tokens, {supervised} supervised[/dim]")
        line, texts = Text(), words(tokens)  # appended, not marked up: a token may be half a bracket
        for token, word, kind in zip(tokens, texts, kinds, strict=True):
            line.append(word, STYLES[kind])
            if ids or not word:
                line.append(f"·{token} ", "dim")
        shown.print(line)
        if any(texts) and not ids:
            # brackets say without colour what is not supervised in a completion
            numbers = [
                f"({token})" if kind == "unsupervised" else f"{token}"
                for token, kind in zip(tokens, kinds, strict=True)
            ]
            shown.print(Text(" ".join(numbers), "dim"))


def _styles(tokens: Sequence[int], mask: Sequence[bool] | None) -> list[str]:
    return ["supervised" if on else "unsupervised" for on in (mask or [True] * len(tokens))]


def _words(dataset: "Dataset") -> Callable[[Sequence[int]], list[str]]:
    """A function from ids to their texts; empty ones where the tokenizer that made the dataset is not at its place."""
    from training.data.tokenizer import load_tokenizer

    path, why = dataset.manifest.tokenizer_path, ""
    try:
        tokenizer = load_tokenizer(path)
        if tokenizer.fingerprint == dataset.manifest.inputs["tokenizer"]:
            return lambda ids: _pieces(tokenizer.backend, ids)
        why = f"{path} is another tokenizer now"
    except TokenizerError as error:
        why = str(error)
    console(stderr=True).print(f"[yellow]ids only:[/yellow] {escaped(why)}")
    return lambda ids: [""] * len(ids)


def _pieces(backend: "Backend", ids: Sequence[int]) -> list[str]:
    """What each id adds to the text before it; a decoder may drop the blank of a first token."""

    def text(tokens: Sequence[int]) -> str:
        return backend.decode(list(tokens), skip_special_tokens=False)

    return [text(ids[max(0, i - 1) : i + 1]).removeprefix(text(ids[max(0, i - 1) : i])) for i in range(len(ids))]
