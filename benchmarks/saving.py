"""What does saving in the background cost a run?

    PAIRLEDGER_TEST_DATA=DIR python -m benchmarks.saving [--pairs 8] [--rounds 3]

Sixty optimizer steps of the 16.3M-parameter model, with a checkpoint (weights and both moments, 0.2 GB) begun every ten
and waited for at the end, and the same steps without: in turns, wall time and CPU seconds of each, and their ratios
round by round. The saves' own work is in the CPU seconds of the run that makes them, whichever thread does it.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from benchmarks.measure import clock, report
from benchmarks.measure.real import Ground, ground
from training.checkpoint import Saver
from training.config import ModelConfig, RunConfig
from training.data.packing import pack
from training.data.tokenize import TokenizedPair
from training.model import load_model
from training.parallel.device import pick
from training.receipt import complete
from training.scores import batch_of
from training.step import Microbatch, build_optimizer, train_step

STEPS, EVERY = 60, 10
ROOM = 4096
CPU = pick("cpu")


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=8, help="pairs of a step")
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    clock.one_thread()
    found: dict[bool, list[tuple[float, float]]] = {False: [], True: []}
    with tempfile.TemporaryDirectory() as folder:
        where = ground(Path(folder) / "ground")
        for number in range(arguments.rounds):
            for saving in (False, True) if number % 2 else (True, False):
                with tempfile.TemporaryDirectory(dir=folder) as run:
                    found[saving].append(measured(where, where.pairs[: arguments.pairs], Path(run) if saving else None))
    wall, cpu = [[[one[kind] for one in found[saving]] for saving in (True, False)] for kind in (0, 1)]
    ratios = [clock.ratio(*wall), clock.ratio(*cpu)]
    rows = [
        (name, f"{clock.middle(w):.1f}", f"{clock.middle(c):.1f}")
        for name, w, c in zip(("saving every ten steps", "not saving"), wall, cpu, strict=True)
    ]
    report.write(
        "saving",
        [
            "# Saving in the background",
            "",
            report.setting(),
            "",
            f"{STEPS} steps of {arguments.pairs} pairs ({where.where}); a checkpoint begun after every {EVERY}th, the "
            f"last one waited for; {arguments.rounds} rounds.",
            "",
            *report.table(["run", "wall s", "CPU s"], [*rows, ("ratio", *(f"{r.middle:.3f}" for r in ratios))]),
            "",
            "Spread of the ratios: wall {}, CPU {}.".format(*(f"{r.low:.3f} to {r.high:.3f}" for r in ratios)),
            "",
            report.goal("wall time with saving, of that without", ratios[0].middle, 1.05, at_most=True),
        ],
    )


def measured(where: Ground, pairs: Sequence[TokenizedPair], folder: Path | None) -> tuple[float, float]:
    """Wall and CPU seconds of sixty steps after one that warms up."""
    config = RunConfig(model=ModelConfig(path=str(where.policy)))
    policy = load_model(config.model, CPU)
    optimizer = build_optimizer(policy.module, config.optimizer)
    tokens = [len(p.prompt_ids) + len(p.chosen_ids) + len(p.rejected_ids) for p in pairs]
    micros = [_microbatch([pairs[i] for i in members]) for members in pack(tokens, range(len(pairs)), ROOM)]
    saver = folder and Saver(folder=folder, module=policy.module, optimizer=optimizer, identity={}, config=config.save)

    def do() -> None:
        train_step(policy, optimizer, micros, pairs=len(pairs), rate=1e-6, config=config, device=CPU)

    do()
    wall, cpu = time.perf_counter(), time.process_time()
    for step in range(1, STEPS + 1):
        do()
        if saver and step % EVERY == 0:
            saver.begin(step, {})
    if saver:
        saver.drain()
        saver.close()
        assert [c.step for c in complete(saver.folder)[0]][0] == STEPS
    return time.perf_counter() - wall, time.process_time() - cpu


def _microbatch(pairs: Sequence[TokenizedPair]) -> Microbatch:
    _, batch = batch_of(pairs, layout="shared", device=CPU.torch)
    lengths = [[len(p.chosen_ids) for p in pairs], [len(p.rejected_ids) for p in pairs]]
    return Microbatch(
        batch=batch, reference=torch.zeros(2, len(pairs)), tokens=torch.tensor(lengths, dtype=torch.float)
    )


if __name__ == "__main__":
    main()
