"""Ranks of a run as real processes without a launcher: forked from one that has imported everything.

Each can be killed as any other; what is saved is the seconds of importing torch, so that a matrix of runs can be had.
"""

import errno
import multiprocessing
import os
import signal
import socket
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint import FileSystemWriter

SAVING = {"while writing": "save_state", "before its manifest": "commit"}
"""Where in a save a rank is killed: the function that it does not come back from."""
FAULTS = ("full disk", "full disk, then term")
"""What the last rank meets without being killed."""
CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["training.run", "training.convert"])


SECONDS_TO_END = 20


def run_ranks(config: Path, store: Path, ranks: int, how: str | None = None, step: int = 0) -> tuple[int, str]:
    """Train with `ranks` processes, one of which meets at a step what `how` says.

    Gives the first one's exit code and output. After a kill the others are killed as well, as an agent does; in all
    other cases they have to end by themselves, with the same code.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    store.mkdir(exist_ok=True)
    meets = ranks - 1 if how in FAULTS else 0
    processes = [
        CONTEXT.Process(target=_rank, args=(rank, ranks, port, config, store, how if rank == meets else None, step))
        for rank in range(ranks)
    ]
    for process in processes:
        process.start()
    processes[0].join(120)
    killed = processes[0].exitcode == -signal.SIGKILL
    for process in processes:
        if killed:
            process.kill()
        process.join(SECONDS_TO_END)
    codes = [process.exitcode for process in processes]
    assert codes[0] is not None and None not in codes, codes
    assert killed or how == "term" or len(set(codes)) == 1, codes
    return codes[0], (store / "rank-0.log").read_text()


def _rank(rank: int, ranks: int, port: int, config: Path, store: Path, how: str | None, step: int) -> None:
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    output = os.open(store / f"rank-{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(output, 1)
    os.dup2(output, 2)
    import torch

    from training.run import main

    torch.set_num_threads(1)
    if how is not None:
        _arrange(how, step)
    sys.exit(main(["--config", str(config), "--store", str(store)]))


def _arrange(how: str, step: int) -> None:
    """End this process at a step (`term`, `kill`), or in the middle of saving it; or let its disk be full then."""
    from training import checkpoint, loop

    def dying(real: Callable[..., Any], number: signal.Signals, now: Callable[..., bool]) -> Callable[..., Any]:
        def call(*args: Any, **kw: Any) -> Any:
            if now(*args, **kw):
                os.kill(os.getpid(), number)
            return real(*args, **kw)

        return call

    if how in FAULTS:
        _fill_disk(step)
        step += 1
    if how in ("term", "kill", "full disk, then term"):
        number = signal.SIGKILL if how == "kill" else signal.SIGTERM
        loop._measured = dying(loop._measured, number, lambda work, loaded: loaded.step == step)
    if how not in SAVING:
        return
    name = SAVING[how]

    def here(*args: Any, **kw: Any) -> bool:
        return f"step_{step}" in Path(kw.get("checkpoint_id") or args[0]).parts

    setattr(checkpoint, name, dying(getattr(checkpoint, name), signal.SIGKILL, here))


def _fill_disk(step: int) -> None:
    """Writing the tensors of a step fails on this rank, in the thread that saves."""
    real = FileSystemWriter.write_data

    def write(self: FileSystemWriter, *args: Any, **kw: Any) -> Any:
        if f"step_{step}" in Path(self.path).parts:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(self, *args, **kw)

    FileSystemWriter.write_data = write


def flattened(case: Sequence[object]) -> str:
    """A case as the name of a folder."""
    return "-".join(map(str, case)).translate(str.maketrans(" (,)'", "_____"))
