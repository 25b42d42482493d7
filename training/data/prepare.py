"""Preparation: a source's rows to a committed dataset, the same bytes for any number of workers.

The main process reads rows without looking into them; workers parse, render and tokenize a chunk and give back columns
(`workers`); the main process takes the results in order, hashes and counts them and appends them to shards (`account`).
Everything is written in a staging folder inside the target and moved into place at the end, the manifest last
(`target`). A preparation that was interrupted goes on from its last finished shard (`journal`). Only a few chunks are
in flight, so memory does not grow with the input.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from training.config import LimitsConfig
from training.data.account import Account
from training.data.manifest import FORMAT, MANIFEST
from training.data.recipe import make_recipe
from training.data.shards import SHARD_BYTES, Dataset, open_dataset
from training.data.sources import SourceSpec, chunks, open_source
from training.data.stored import StoredPairs, describe, rewind
from training.data.target import check_target, commit, locked, same_dataset, staged
from training.data.tokenizer import load_tokenizer
from training.data.workers import results

Progress = Callable[[int, int | None], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class PrepareReport:
    """What a preparation did."""

    dataset: Dataset
    reused: bool
    """An equal dataset was there and verified; nothing was written."""
    seconds: float
    resumed: int = 0
    """Shards that an interrupted preparation had finished."""

    def to_json(self) -> dict[str, Any]:
        """The keys that `pairledger prepare --json` prints."""
        manifest = self.dataset.manifest
        return {
            "dataset": manifest.fingerprint,
            "path": str(self.dataset.path),
            "reused": self.reused,
            "resumed": self.resumed,
            **manifest.counts,
            "shards": [shard.file for shard in manifest.shards],
            "tokens": dict(manifest.tokens),
            "fingerprints": dict(manifest.inputs),
            "seconds": round(self.seconds, 3),
        }


def prepare(
    given: SourceSpec | StoredPairs,
    tokenizer: Path,
    out: Path,
    *,
    template: Path | None = None,
    date: str | None = None,
    limits: LimitsConfig | None = None,
    max_quarantine: float = 1.0,
    workers: int | None = None,
    progress: Progress | None = None,
    by_fingerprint: bool = False,
    shard_bytes: int = SHARD_BYTES,
) -> PrepareReport:
    """Prepare a source, or pairs that were stored from one.

    Args:
        given: The source, or its stored pairs.
        tokenizer: Folder with `tokenizer.json`.
        out: The dataset's folder; with `by_fingerprint` the folder in which each version has one named by it.
        template: Jinja file used instead of the tokenizer's own chat template.
        date: Day that a template which asks for the date is given.
        limits: `max_tokens` and `overflow`.
        max_quarantine: Largest share of outcomes that may be refused before nothing is written.
        workers: Processes that tokenize; one a core if None. The result does not depend on it.
        progress: Called with rows done and, where known, rows in all.
        by_fingerprint: See `out`.
        shard_bytes: Bytes of ids at which a shard is full.

    Raises:
        InputError: the source, the tokenizer or the template cannot be used, no pair or too few were let in, or `out`
            cannot be written. Nothing visible is left behind.
    """
    began = time.monotonic()
    limits = limits or LimitsConfig()
    loaded = load_tokenizer(tokenizer, template)
    recipe = make_recipe(loaded, date=date, max_tokens=limits.max_tokens, overflow=limits.overflow)
    source = given if isinstance(given, StoredPairs) else open_source(given)
    about = source.source if isinstance(source, StoredPairs) else describe(source)
    inputs = {
        "source": about["fingerprint"],
        "tokenizer": loaded.fingerprint,
        "template": recipe.template_fingerprint,
        "recipe": recipe.fingerprint,
    }
    check_target(out, by_fingerprint=by_fingerprint)
    with locked(out):
        known = sorted(out.glob(f"*/{MANIFEST}")) if by_fingerprint else [out / MANIFEST]
        same = next((found for path in known if (found := same_dataset(path.parent, inputs, about))), None)
        if same is not None:
            return PrepareReport(dataset=same, reused=True, seconds=time.monotonic() - began)
        with staged(out, FORMAT, inputs, about, shard_bytes) as staging:
            with closing(Account(staging, inputs, shard_bytes)) as account:
                resumed = account.shards
                every = rewind(source) if isinstance(source, StoredPairs) else chunks(source)
                incoming = islice(every, account.chunks, None)
                for done in results(incoming, loaded, recipe, tokenizer, template, workers):
                    account.take(done)
                    if progress:
                        progress(account.rows, None)
                loaded.check_unchanged()
                manifest = account.manifest(about, inputs, loaded, recipe, max_quarantine)
            final = out / manifest.fingerprint.replace(":", "-") if by_fingerprint else out
            commit(staging, final, manifest)
    return PrepareReport(
        dataset=open_dataset(final, verify=False), reused=False, seconds=time.monotonic() - began, resumed=resumed
    )
