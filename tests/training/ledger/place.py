"""A prepared dataset, a tiny model and a run's configuration on disk, and the processes that use them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from pipeline.demo.task import write_tokenizer
from tests.training.memory import write_model
from training.data.prepare import prepare
from training.data.sources import SourceSpec
from training.data.tokenizer import load_tokenizer

ROOT = Path(__file__).parents[3]
RUN = """
[data]
datasets = ["{place}/prepared/low", "{place}/prepared/high"]
[plan]
pairs_per_step = 8
epochs = {epochs}
pack_tokens = 128
[model]
path = "{place}/model"
[optimizer]
lr = 1e-3
[devices]
kind = "cpu"
[save]
steps = 5
"""
STEPS_AN_EPOCH = 12


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where a run's inputs lie."""

    folder: Path

    def config(self, epochs: int, more: str = "") -> Path:
        """`RUN.toml` of a run of 12 steps an epoch."""
        path = self.folder / f"run-{epochs}.toml"
        path.write_text(RUN.format(place=self.folder, epochs=epochs) + more)
        return path


def make_place(folder: Path) -> Place:
    """Ninety-six pairs of two sources in two datasets."""
    write_tokenizer(folder / "tokenizer")
    small = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    write_model(folder / "model", vocab_size=load_tokenizer(folder / "tokenizer").vocab_size, **small)
    for source, first in (("low", 10), ("high", 500)):
        asked = [(n, f"Which is larger, {n} or {n + 1}?") for n in range(first, first + 48)]
        rows = [{"prompt": text, "chosen": f"{n + 1}", "rejected": f"{n} is larger"} for n, text in asked]
        path = folder / f"{source}.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        spec = SourceSpec(name=source, inputs=(str(path),))
        prepare(spec, folder / "tokenizer", folder / "prepared" / source, workers=1)
    return Place(folder=folder)


def python(*words: str, before: str = "") -> subprocess.Popen[str]:
    """A Python process of its own; `before` is run in a shell that becomes it."""
    command = [sys.executable, *words]
    if before:
        command = ["bash", "-c", f'{before} && exec "$@"', "bash", *command]
    return subprocess.Popen(
        command,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"},
        cwd=ROOT,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )


def trainer(config: Path, store: Path, *, before: str = "") -> subprocess.Popen[str]:
    """`python -m training.run`."""
    return python("-m", "training.run", "--config", str(config), "--store", str(store), before=before)


def loader(store: Path) -> subprocess.Popen[str]:
    """A process that loads the store's ledgers over and over."""
    return python("-c", "import sys\nfrom training.ledger.store import load\nwhile True: load(sys.argv[1])", str(store))
