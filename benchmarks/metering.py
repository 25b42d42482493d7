"""What does the account of a step cost beside the step itself?

    python -m benchmarks.metering

Runs of the demonstration's model (0.3M parameters: the smaller a model, the larger the share) with 64 and with 512
pairs a step, of about 40 and about 300 tokens. In one and the same run, CPU seconds of everything that exists for the
ledger (reading the packs, joining the ranks' readings, building the record, writing and syncing its line) are held
against those of the whole step; the first step, in which everything is warmed up, is left out. Prints, and writes
benchmarks/results/metering_HARDWARE_YYYYMM.md.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.measure import report
from pipeline.demo.base import random_model
from pipeline.demo.task import write_tokenizer
from training import loop
from training.config import RunConfig, parse
from training.data.prepare import prepare
from training.data.sources import SourceSpec
from training.data.tokenizer import load_tokenizer
from training.ledger.writer import LedgerWriter
from training.run import run_training

STEPS = 6
CASES = ((64, 5), (512, 5), (64, 90), (512, 90))
"""Pairs a step, and numbers in a question."""
PARTS = ((loop, "_measured"), (loop, "_record"), (LedgerWriter, "append"))
"""Where the account is made; the first reads the packs, the second joins the readings and builds the record."""


@dataclass
class Clock:
    """CPU and wall seconds of the account so far, and those of everything at the end of each step."""

    account: dict[str, float] = field(default_factory=lambda: {name: 0.0 for _, name in PARTS})
    wall: float = 0.0
    steps: list[tuple[float, float, float, float]] = field(default_factory=list)

    def tick(self) -> None:
        """Note that a step has ended."""
        now = time.process_time(), time.perf_counter()
        self.steps.append((sum(self.account.values()), self.wall, *now))


@contextmanager
def watched(clock: Clock) -> Generator[None]:
    """Have the parts of the account timed."""

    def timed(name: str, work: Callable[..., Any]) -> Callable[..., Any]:
        def measured(*args: Any, **named: Any) -> Any:
            cpu, wall = time.thread_time(), time.perf_counter()
            try:
                return work(*args, **named)
            finally:
                clock.account[name] += time.thread_time() - cpu
                clock.wall += time.perf_counter() - wall

        return measured

    own = [(place, name, getattr(place, name)) for place, name in PARTS]
    for place, name, work in own:
        setattr(place, name, timed(name, work))
    try:
        yield
    finally:
        for place, name, work in own:
            setattr(place, name, work)


def prepared(folder: Path, pairs: int, numbers: int) -> Path:
    """A dataset of random questions of so many numbers, from two sources' names."""
    rng, path = np.random.default_rng(0), folder / "pairs.jsonl"
    with path.open("w") as file:
        for _ in range(pairs):
            several = " ".join(map(str, rng.integers(10, 100, numbers + int(rng.integers(0, numbers)))))
            answers = [f"{n} is larger" for n in rng.choice(90, 2, replace=False) + 10]
            file.write(json.dumps({"prompt": several, "chosen": answers[0], "rejected": answers[1]}) + "\n")
    spec = SourceSpec(name="numbers", inputs=(str(path),))
    prepare(spec, folder / "tokenizer", folder / "prepared", workers=1)
    return folder / "prepared"


def measured(pairs_per_step: int, numbers: int) -> str:
    """One row of the table: shares of a run's steps."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_tokenizer(folder / "tokenizer")
        random_model(folder / "model", load_tokenizer(folder / "tokenizer"), seed=0)
        sections: dict[str, Any] = {
            "data": {"datasets": [str(prepared(folder, pairs_per_step * STEPS, numbers))], "duplicates": "keep"},
            "plan": {"pairs_per_step": pairs_per_step, "pack_tokens": 2048},
            "model": {"path": str(folder / "model")},
            "devices": {"kind": "cpu"},
        }
        clock, tokens = Clock(), list[int]()

        def progress(record: Any, _: int) -> None:
            clock.tick()
            tokens.append(record.counters.source_tokens)

        with watched(clock):
            run_training(parse(sections, RunConfig, where="the benchmark's run"), folder / "store", progress=progress)
    spent = np.diff(np.array(clock.steps), axis=0)  # account CPU, account wall, CPU, wall
    cpu, wall = spent[:, 0] / spent[:, 2], spent[:, 1] / spent[:, 3]
    per_pair = 1e6 * spent[:, 0].sum() / (pairs_per_step * len(spent))
    total = sum(clock.account.values())
    parts = " | ".join(f"{clock.account[name] / total:.0%}" for _, name in PARTS)
    return (
        f"| {pairs_per_step} | {np.mean(tokens) / pairs_per_step:.0f} | {np.median(spent[:, 2]):.2f} | "
        f"{spent[:, 0].sum() / spent[:, 2].sum():.2%} | {cpu.min():.2%} to {cpu.max():.2%} | "
        f"{spent[:, 1].sum() / spent[:, 3].sum():.2%} | {wall.min():.2%} to {wall.max():.2%} | "
        f"{per_pair:.0f} | {parts} |"
    )


def main() -> None:
    """Measure, print, write."""
    torch.set_num_threads(1)
    lines = [
        "# What the account of a step costs",
        "",
        report.setting(("torch",)),
        "",
        f"A model of 0.3M parameters; {STEPS - 1} steps each, spread over steps. The aim: below 1 % of CPU seconds.",
        "",
        "| pairs a step | tokens a pair | CPU s a step | share of CPU | spread | share of wall, fsync in it | spread | "
        "CPU µs a pair | packs read | record | line written |",
        "|-:|-:|-:|-:|-:|-:|-:|-:|-:|-:|-:|",
        *(measured(*case) for case in CASES),
    ]
    report.write("metering", lines)


if __name__ == "__main__":
    main()
