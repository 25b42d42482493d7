"""Runs of two processes as a person starts them: they end together, whatever happens to one."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from pipeline.cli import main
from pipeline.demo.base import random_model
from pipeline.demo.task import write_tokenizer
from tests.pipeline.forked import SECONDS_TO_END
from training.data.tokenizer import load_tokenizer
from training.ledger.record import StepRecord
from training.ledger.writer import read_ledger

pytestmark = pytest.mark.distributed

ROOT = Path(__file__).parents[2]
RUN = """
[data]
datasets = ["prepared"]
[plan]
pairs_per_step = 6
epochs = {epochs}
pack_tokens = 128
[model]
path = "model"
[optimizer]
lr = 1e-3
[devices]
kind = "cpu"
processes = {processes}
{degree} = {processes}
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    """Twenty pairs prepared, and a model."""
    place = tmp_path_factory.mktemp("ranks")
    asked = "Which is larger, {} or {}?"
    rows = [{"prompt": asked.format(n, n + 1), "chosen": f"{n + 1}", "rejected": f"{n} it is"} for n in range(10, 30)]
    (place / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    write_tokenizer(place / "tokenizer")
    random_model(place / "model", load_tokenizer(place / "tokenizer"), seed=0)
    words = "prepare {0}/pairs.jsonl --tokenizer {0}/tokenizer --out {0}/prepared --workers 1 --json"
    assert main(words.format(place).split()) == 0
    return place


def configured(place: Path, store: str, *, processes: int, degree: str, epochs: int = 2) -> Path:
    """A RUN.toml called as its store."""
    path = place / f"{store}.toml"
    path.write_text(RUN.format(epochs=epochs, processes=processes, degree=degree))
    return path


def start(
    place: Path,
    store: str,
    *,
    processes: int = 2,
    degree: str = "dp_shard",
    epochs: int = 2,
    patch: str = "pass",
) -> subprocess.Popen[str]:
    """`pairledger train`, with `patch` run in the second rank before anything else."""
    folder = place / store
    folder.mkdir(exist_ok=True)
    config = configured(place, store, processes=processes, degree=degree, epochs=epochs)
    (folder / "sitecustomize.py").write_text(f"import os\nif os.environ.get('RANK') == '1':\n    {patch}\n")
    return launched(config, folder)


def launched(config: Path, store: Path) -> subprocess.Popen[str]:
    """`pairledger train` in a session of its own; what lies in the store is imported first."""
    words = ["-m", "pipeline.cli", "train", "--config", str(config), "--store", str(store)]
    return subprocess.Popen(
        [sys.executable, *words],
        env={**os.environ, "PYTHONPATH": f"{store}:{ROOT}", "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"},
        cwd=ROOT,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )


def finished(process: subprocess.Popen[str], seconds: float = 120) -> tuple[int, str]:
    said, _ = process.communicate(timeout=seconds)
    return process.returncode, said


def until(process: subprocess.Popen[str], line: str) -> str:
    """Read what it prints up to this line."""
    assert process.stdout
    said = ""
    for printed in process.stdout:
        said += printed
        if line in printed:
            return said
    raise AssertionError(said)


def ranks_of(process: subprocess.Popen[str]) -> dict[int, int]:
    """Process ids of the ranks that an agent started."""
    found: dict[int, int] = {}
    children = subprocess.run(["pgrep", "-P", str(process.pid)], capture_output=True, text=True, check=False).stdout
    for pid in map(int, children.split()):
        environment = Path(f"/proc/{pid}/environ").read_bytes().decode(errors="replace")
        if match := re.search(r"\0RANK=(\d+)", environment):
            found[int(match[1])] = pid
    return found


def lines(place: Path, store: str) -> list[StepRecord]:
    """The current lines of the store's one run."""
    attempts = sorted((place / store).glob("runs/*/attempts/*/steps.jsonl"))
    records = {record.step: record for attempt in attempts for record in read_ledger(attempt)[0]}
    return [records[step] for step in sorted(records)]


def gone(process: subprocess.Popen[str]) -> bool:
    return not subprocess.run(["pgrep", "-g", str(process.pid)], capture_output=True, check=False).stdout


@pytest.fixture(scope="module")
def alone(place: Path) -> list[StepRecord]:
    """The lines of one process."""
    code, said = finished(start(place, "alone", processes=1))
    assert code == 0, said
    made = lines(place, "alone")
    assert len(made) == 8
    return made


def test_two_ranks_finish_with_the_ledger_of_one(place: Path, alone: list[StepRecord]) -> None:
    for degree in ("dp_shard", "ulysses", "cp"):
        code, said = finished(start(place, degree, degree=degree))
        assert code == 0, said
        assert len(re.findall("^step 1/8", said, re.M)) == 1  # the first rank speaks for all
        assert said.count('"run_id"') == 1
        for a, b in zip(alone, lines(place, degree), strict=True):
            assert a.counters and b.counters
            assert (a.counters.source_tokens, a.counters.loss_tokens) == (
                b.counters.source_tokens,
                b.counters.loss_tokens,
            )
            assert b.loss == pytest.approx(a.loss, rel=1e-5)
        assert list((place / degree).glob("runs/*/export/model.safetensors"))


def test_two_agents_that_meet_share_a_run(place: Path, alone: list[StepRecord]) -> None:
    """As on two machines: each starts half of the ranks, one rank leads, and the ledger is that of one process."""
    config = configured(place, "met", processes=2, degree="dp_shard")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        meeting = f"127.0.0.1:{free.getsockname()[1]}"
    words = ["-m", "training.ranks", "--config", str(config), "--store", str(place / "met")]
    agents = [
        subprocess.Popen(
            [sys.executable, *words, "--nodes", "2", "--rendezvous", meeting],
            env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
            cwd=ROOT,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        for _ in range(2)
    ]
    ended = [finished(agent) for agent in agents]
    assert [code for code, _ in ended] == [0, 0], ended
    assert sum(said.count('"run_id"') for _, said in ended) == 1
    for a, b in zip(alone, lines(place, "met"), strict=True):
        assert b.counters and a.counters and b.ranks_reported == 2
        assert (a.counters.source_tokens, a.counters.pairs) == (b.counters.source_tokens, b.counters.pairs)
        assert b.loss == pytest.approx(a.loss, rel=1e-5)


def test_stopped_on_one_topology_it_resumes_on_another(place: Path, alone: list[StepRecord]) -> None:
    """Same pairs, and losses within fp32 rounding of the unbroken run's."""
    process = start(place, "moved", epochs=40)
    until(process, "step 2/")
    os.kill(process.pid, signal.SIGTERM)
    code, said = finished(process)
    assert code == 128 + signal.SIGTERM, said
    (checkpoint,) = (place / "moved").glob("runs/*/checkpoints/step_*")
    reached = int(checkpoint.name.removeprefix("step_"))
    code, said = finished(start(place, "moved", degree="cp"))
    assert code == 0 and f"resumed from {checkpoint}" in said, said
    assert reached >= 2
    for a, b in zip(alone, lines(place, "moved"), strict=False):
        assert sorted(p.row for p in a.pairs) == sorted(p.row for p in b.pairs)
        assert a.loss == pytest.approx(b.loss, rel=1e-4)


def test_a_killed_rank_takes_the_others_with_it_and_is_named(place: Path) -> None:
    process = start(place, "killed", epochs=400)
    until(process, "step 2/")
    os.kill(ranks_of(process)[1], signal.SIGKILL)
    began = time.monotonic()
    code, said = finished(process)
    assert time.monotonic() - began < SECONDS_TO_END
    assert code == 128 + signal.SIGKILL and "rank 1 was ended by SIGKILL" in said, said
    assert gone(process)


def test_ranks_whose_agent_is_killed_save_and_end_by_themselves(place: Path) -> None:
    """Nobody is left holding the run, and whoever starts it again goes on from there."""
    process = start(place, "agentless", epochs=400)
    until(process, "step 2/")
    ranks = ranks_of(process)
    assert sorted(ranks) == [0, 1]
    os.kill(process.pid, signal.SIGKILL)
    began = time.monotonic()
    while any(map(alive, ranks.values())) and time.monotonic() - began < SECONDS_TO_END:
        time.sleep(0.2)
    assert not any(map(alive, ranks.values())), "a rank outlived its agent"
    said = process.communicate(timeout=SECONDS_TO_END)[0]
    assert "the process that started this rank is gone; stopping" in said, said
    saved = max(int(p.name.removeprefix("step_")) for p in (place / "agentless").glob("runs/*/checkpoints/step_*"))
    assert saved == len(lines(place, "agentless")) >= 2
    again = start(place, "agentless", epochs=400)
    until(again, f"step {saved + 1}/")
    os.kill(again.pid, signal.SIGTERM)
    assert finished(again)[0] == 128 + signal.SIGTERM


def alive(pid: int) -> bool:
    """Whether a process runs; one that has ended and waits to be asked about does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


FAULTS = {
    "reads": (
        "import training.loop as m; real = m.load\n"
        "    def broken(work, step):\n"
        "        if step == 3: raise OSError('shard-00000.arrow: input/output error')\n"
        "        return real(work, step)\n"
        "    m.load = broken",
        1,
        "error: rank 1: OSError: shard-00000.arrow: input/output error",
    ),
    "computes": (
        "import training.loop as m; real = m.train_step\n"
        "    def broken(*args, **kw):\n"
        "        broken.calls += 1\n"
        "        if broken.calls == 2: raise ValueError('a bad batch')\n"
        "        return real(*args, **kw)\n"
        "    broken.calls = 0; m.train_step = broken",
        1,
        "error: rank 1 failed first: ValueError: a bad batch",
    ),
    "is another's": (
        "import training.setup as m, dataclasses; real = m.prepare\n"
        "    def other(*args):\n"
        "        run = real(*args)\n"
        "        return dataclasses.replace(run, identity={**run.identity, 'plan': 'plan1:other'})\n"
        "    m.prepare = other",
        4,
        "and plan1:other on rank 1; every rank must read the same files",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_what_one_rank_meets_ends_all_in_seconds(place: Path, fault: str) -> None:
    patch, expected, sentence = FAULTS[fault]
    process = start(place, fault.replace(" ", "-").replace("'", ""), epochs=400, patch=patch)
    began = time.monotonic()
    code, said = finished(process)
    assert code == expected and sentence in said, said
    assert gone(process)
    assert time.monotonic() - began < 60 + SECONDS_TO_END, "imports take their time; a hang would take half an hour"
