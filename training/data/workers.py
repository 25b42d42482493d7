"""Chunks to results, in order, on one process or several.

Workers are spawned, not forked: a fork of a process whose tokenizer or torch has run threads can hang. Each loads the
tokenizer once and has a pipe of its own: a queue that several share waits for ever for the rest of what a killed one
was writing. A result travels as columns, which cost nothing to take apart, not as lists of Python integers.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import traceback
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain, islice
from multiprocessing.connection import Connection, Pipe
from multiprocessing.context import SpawnProcess
from pathlib import Path
from queue import SimpleQueue
from typing import Any, NamedTuple, TypeAlias, cast

import pyarrow as pa

from training.data.pair import Pair, Rejection
from training.data.recipe import Recipe
from training.data.shards import to_batch
from training.data.sources import RawChunk, parse
from training.data.stored import OutcomeChunk, restore
from training.data.tokenize import Notes, TokenizedPair, tokenize_pairs
from training.data.tokenizer import Tokenizer, load_tokenizer
from training.errors import IdentityError

End: TypeAlias = "Connection[Any, Any]"
"""One end of a pipe."""

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


def results(
    incoming: Iterator[RawChunk | OutcomeChunk],
    tokenizer: Tokenizer,
    recipe: Recipe,
    folder: Path,
    template: Path | None,
    workers: int | None,
) -> Iterator[Done]:
    """Results in the order of the chunks.

    Raises:
        ChildProcessError: a worker process died.
        IdentityError: a worker found another tokenizer than `tokenizer` in `folder`.
    """
    first: list[RawChunk | OutcomeChunk] = list(islice(incoming, FEW + 1))
    count = workers or os.cpu_count() or 1
    if count == 1 or len(first) <= FEW or multiprocessing.current_process().daemon:
        yield from (_work(chunk, tokenizer, recipe) for chunk in chain(first, incoming))
        return
    staff = [_hire(folder, template, tokenizer.fingerprint, recipe) for _ in range(count)]
    idle: SimpleQueue[_Worker] = SimpleQueue()
    for worker in staff:
        idle.put(worker)
    threads = ThreadPoolExecutor(count)
    flying: deque[Future[Done]] = deque()
    try:
        for chunk in chain(first, incoming):
            flying.append(threads.submit(_ask, idle, chunk))
            if len(flying) > 2 * count:
                yield flying.popleft().result()
        while flying:
            yield flying.popleft().result()
    finally:
        threads.shutdown(wait=False, cancel_futures=True)
        for worker in staff:
            worker.process.terminate()  # it waits for work, or its result is not wanted any more
            worker.process.join()
            worker.connection.close()
        threads.shutdown()


class _Worker(NamedTuple):
    """A worker process, and the parent's end of the pipe that nobody else holds: it ends when either dies."""

    process: SpawnProcess
    connection: End


def _hire(folder: Path, template: Path | None, fingerprint: str, recipe: Recipe) -> _Worker:
    context = multiprocessing.get_context("spawn")
    ours, theirs = cast("tuple[End, End]", Pipe())
    process = context.Process(target=_serve, args=(theirs, folder, template, fingerprint, recipe), daemon=True)
    process.start()
    theirs.close()
    return _Worker(process, ours)


def _ask(idle: SimpleQueue[_Worker], chunk: RawChunk | OutcomeChunk) -> Done:
    """Have a worker do a chunk; there are as many callers at a time as workers."""
    worker = idle.get()
    try:
        worker.connection.send(chunk)
        answer: Done | Exception = worker.connection.recv()
    except (EOFError, OSError):
        raise ChildProcessError("a worker process died (killed, or out of memory)") from None
    finally:
        idle.put(worker)
    if isinstance(answer, Exception):
        raise answer
    return answer


def _serve(connection: End, folder: Path, template: Path | None, fingerprint: str, recipe: Recipe) -> None:
    """What a worker process does until its parent ends it, or ends itself."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent is told, too
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the processes are the parallelism
    tokenizer = None
    with suppress(EOFError, OSError):
        while True:
            chunk: RawChunk | OutcomeChunk = connection.recv()
            try:
                tokenizer = tokenizer or _same_tokenizer(folder, template, fingerprint)
                answer: Done | Exception = _work(chunk, tokenizer, recipe)
            except Exception as error:
                error.add_note(traceback.format_exc())
                answer = error
            connection.send(answer)


def _same_tokenizer(folder: Path, template: Path | None, fingerprint: str) -> Tokenizer:
    tokenizer = load_tokenizer(folder, template)
    if tokenizer.fingerprint != fingerprint:
        raise IdentityError(
            f"tokenizer {folder} changed on disk while it was in use: {fingerprint} became {tokenizer.fingerprint}; "
            "prepare again"
        )
    return tokenizer


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
