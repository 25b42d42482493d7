"""Chunks to results, in order, on one process or several.

Workers are spawned, not forked: a fork of a process whose tokenizer or torch has run threads can hang. Each loads the
tokenizer once. A result travels as columns, which cost nothing to take apart, not as lists of Python integers.
"""

from __future__ import annotations

import multiprocessing
import os
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path

import pyarrow as pa

from training.data.pair import Pair, Rejection
from training.data.recipe import Recipe
from training.data.shards import to_batch
from training.data.sources import RawChunk, parse
from training.data.stored import OutcomeChunk, restore
from training.data.tokenize import Notes, TokenizedPair, tokenize_pairs
from training.data.tokenizer import Tokenizer, load_tokenizer
from training.errors import DatasetError

FEW = 2
"""Chunks that are not worth a pool of workers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Done:
    """What became of a chunk."""

    rows: int
    batch: bytes
    """Rows of `shards.SCHEMA`, as an Arrow stream."""
    refused: list[Rejection]
    notes: Notes


def _work(chunk: RawChunk | OutcomeChunk, tokenizer: Tokenizer, recipe: Recipe) -> Done:
    outcomes = parse(chunk) if isinstance(chunk, RawChunk) else restore(chunk)
    pairs = [outcome for outcome in outcomes if isinstance(outcome, Pair)]
    tokenized, notes = tokenize_pairs(pairs, tokenizer, recipe)
    fate = iter(tokenized)
    after = [next(fate) if isinstance(outcome, Pair) else outcome for outcome in outcomes]
    sink = pa.BufferOutputStream()
    batch = to_batch([row for row in after if isinstance(row, TokenizedPair)])
    with pa.ipc.new_stream(sink, batch.schema) as writer:
        writer.write_batch(batch)
    refused = [row for row in after if isinstance(row, Rejection)]
    return Done(rows=len(chunk), batch=sink.getvalue().to_pybytes(), refused=refused, notes=notes)


@dataclass(slots=True)
class _Worker:
    """What a worker process keeps between chunks."""

    tokenizer: Tokenizer | None = None
    recipe: Recipe | None = None


_worker = _Worker()


def _start(folder: Path, template: Path | None, recipe: Recipe) -> None:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the processes are the parallelism
    _worker.tokenizer, _worker.recipe = load_tokenizer(folder, template), recipe


def _work_here(chunk: RawChunk | OutcomeChunk) -> Done:
    assert _worker.tokenizer is not None and _worker.recipe is not None
    return _work(chunk, _worker.tokenizer, _worker.recipe)


def results(
    incoming: Iterator[RawChunk] | Iterator[OutcomeChunk],
    tokenizer: Tokenizer,
    recipe: Recipe,
    folder: Path,
    template: Path | None,
    workers: int | None,
) -> Iterator[Done]:
    """Results in the order of the chunks."""
    first: list[RawChunk | OutcomeChunk] = list(islice(incoming, FEW + 1))
    count = workers or os.cpu_count() or 1
    if count == 1 or len(first) <= FEW or multiprocessing.current_process().daemon:
        yield from (_work(chunk, tokenizer, recipe) for chunk in chain(first, incoming))
        return
    pool = ProcessPoolExecutor(
        count,
        mp_context=multiprocessing.get_context("spawn"),
        initializer=_start,
        initargs=(folder, template, recipe),
    )
    flying: deque[Future[Done]] = deque()
    try:
        for chunk in chain(first, incoming):
            flying.append(pool.submit(_work_here, chunk))
            if len(flying) > 2 * count:
                yield flying.popleft().result()
        while flying:
            yield flying.popleft().result()
    except BrokenProcessPool:
        raise DatasetError(
            f"one of {count} worker processes died while preparing (killed, or out of memory); nothing was written; "
            "try again, with fewer --workers if memory is short"
        ) from None
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
