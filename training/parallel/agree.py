"""What all ranks do together or not at all.

A fault that one rank meets before a step (a file it cannot read, a fingerprint unlike the others') would leave the rest
waiting in a collective. Ranks therefore exchange what went wrong between hosts first, and all raise the same sentence.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

from training.errors import IdentityError, PairLedgerError, TrainingError
from training.parallel.mesh import World

T = TypeVar("T")

log = logging.getLogger("training")


def attempted(compute: Callable[[], T]) -> tuple[T | None, PairLedgerError | None]:
    """What `compute` gives, or the fault it met; one that is no person's to mend is logged with its stack."""
    try:
        return compute(), None
    except PairLedgerError as error:
        return None, error
    except Exception as error:
        log.exception("unexpected")
        return None, TrainingError(f"{type(error).__name__}: {error}")


def raise_first(faults: Sequence[PairLedgerError | None]) -> None:
    """Raise the first rank's fault, on every rank in the same words.

    Raises:
        PairLedgerError: of the kind the rank met; names the rank where there are several.
    """
    for rank, fault in enumerate(faults):
        if fault is not None:
            raise type(fault)(f"rank {rank}: {fault}" if len(faults) > 1 else str(fault)) from None


def together(world: World, compute: Callable[[], T]) -> T:
    """Run `compute` on every rank; where it fails on one, it fails on all.

    Raises:
        PairLedgerError: as `raise_first`.
    """
    if world.size == 1:
        return compute()
    found, fault = attempted(compute)
    raise_first(world.gather(fault))
    return found  # pyright: ignore[reportReturnType]  # no fault: it is what compute gave


def same(world: World, facts: Mapping[str, str]) -> None:
    """Compare what each rank read by itself.

    Raises:
        IdentityError: names the first field that differs, the two ranks and both values.
    """
    every = world.gather(dict(facts))
    for rank, theirs in enumerate(every):
        for name in sorted({*every[0], *theirs}):
            if every[0].get(name) != theirs.get(name):
                raise IdentityError(
                    f"{name} is {every[0].get(name)} on rank 0 and {theirs.get(name)} on rank {rank}; every rank must "
                    "read the same files: mount one store, or copy it whole"
                )
