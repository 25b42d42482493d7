"""Where a run stopped, how, and where it goes on: the ledger and the weights are those of the unbroken run."""

import itertools
import random
import shutil
import signal
from pathlib import Path

import pytest
from safetensors.torch import load_file

from tests.pipeline.forked import FAULTS, flattened, run_ranks
from tests.pipeline.test_ranks import RUN, lines, place

pytestmark = pytest.mark.distributed
__all__ = ["place"]

STEPS = range(1, 9)
"""Twenty pairs, six a step, two epochs: the fourth step of an epoch has two."""
HOW = ("term", "kill", "while writing", "before its manifest")
TOPOLOGIES = ((1, "dp_shard"), (2, "dp_shard"), (2, "cp"), (2, "ulysses"))
SAVES = "[save]\nsteps = 1\nkeep = 3\n"
WEIGHTS = {"full": "", "adapter": "[model.lora]\nrank = 4\nalpha = 8\n"}
EXITS = {"term": 128 + signal.SIGTERM}

Case = tuple[int, str, tuple[int, str], tuple[int, str], str]
EVERY: list[Case] = list(itertools.product(STEPS, HOW, TOPOLOGIES, TOPOLOGIES, WEIGHTS))


def pairwise(seed: int = 22) -> list[Case]:
    """Cases in which every two values of two columns meet, taken greedily."""
    wanted = {(i, j, case[i], case[j]) for case in EVERY for i, j in itertools.combinations(range(5), 2)}
    rng, chosen = random.Random(seed), list[Case]()
    while wanted:
        met = {
            case: sum((i, j, case[i], case[j]) in wanted for i, j in itertools.combinations(range(5), 2))
            for case in rng.sample(EVERY, 60)
        }
        best = max(met, key=lambda case: met[case])
        chosen.append(best)
        wanted -= {(i, j, best[i], best[j]) for i, j in itertools.combinations(range(5), 2)}
    return chosen


def configured(place: Path, name: str, topology: tuple[int, str], weights: str) -> Path:
    path = place / f"{name}.toml"
    path.write_text(RUN.format(epochs=2, processes=topology[0], degree=topology[1]) + SAVES + WEIGHTS[weights])
    return path


@pytest.fixture(scope="module")
def unbroken(place: Path) -> dict[str, str]:
    """Stores of runs that nobody stopped, by what is trained."""
    for weights in WEIGHTS:
        name = f"unbroken-{weights}"
        code, said = run_ranks(configured(place, name, TOPOLOGIES[0], weights), place / name, 1)
        assert code == 0, said
    return {weights: f"unbroken-{weights}" for weights in WEIGHTS}


@pytest.mark.parametrize("case", pairwise(), ids=str)
def test_a_run_that_was_stopped_goes_on_as_if_it_had_not_been(
    place: Path, unbroken: dict[str, str], case: Case
) -> None:
    stopped_and_resumed(place, unbroken[case[4]], case)


@pytest.mark.slow
@pytest.mark.parametrize("case", EVERY, ids=str)
def test_every_case_of_the_matrix(place: Path, unbroken: dict[str, str], case: Case) -> None:
    stopped_and_resumed(place, unbroken[case[4]], case)


def stopped_and_resumed(place: Path, unbroken: str, case: Case) -> None:
    *began, after, weights = case
    store = place / flattened(case)
    shutil.copytree(stopped(place, (*began, weights)), store)
    code, said = run_ranks(configured(place, store.name, after, weights), store, after[0])
    assert code == 0, said
    exact = case[2] == after == TOPOLOGIES[0]
    whole, made = lines(place, unbroken), lines(place, store.name)
    assert [record.step for record in made] == list(STEPS)
    for a, b in zip(whole, made, strict=True):
        assert a.counters and b.counters
        assert sorted(p.row for p in a.pairs) == sorted(p.row for p in b.pairs)
        assert (a.counters.source_tokens, a.counters.loss_tokens) == (b.counters.source_tokens, b.counters.loss_tokens)
        assert b.loss == a.loss if exact else b.loss == pytest.approx(a.loss, rel=1e-4)
    (mine,), (theirs,) = ((place / name).glob("runs/*/export/model.safetensors") for name in (store.name, unbroken))
    left, right = load_file(mine), load_file(theirs)
    assert left.keys() == right.keys() and len(left) > 10
    for name, tensor in right.items():
        distance = float((left[name] - tensor).norm() / tensor.norm())
        assert distance == 0 if exact else distance < 1e-4, (name, distance)
    shutil.rmtree(store)


def stopped(place: Path, began: tuple[int, str, tuple[int, str], str]) -> Path:
    """The store of a run that was stopped so; made once."""
    step, how, before, weights = began
    store = place / flattened(("stopped", *began))
    if not store.exists():
        code, said = run_ranks(configured(place, store.name, before, weights), store, before[0], how, step)
        assert code == (0 if how == "term" and step == STEPS[-1] else EXITS.get(how, -signal.SIGKILL)), said
    return store


@pytest.mark.parametrize("how", FAULTS)
@pytest.mark.parametrize("step", [2, STEPS[-1]])
def test_a_save_that_fails_on_one_rank_ends_all_and_leaves_no_checkpoint(
    place: Path, unbroken: dict[str, str], how: str, step: int
) -> None:
    """vector 30: in the background, on a disk of the second rank; told at the next step, the end, or a stop."""
    store = place / flattened((how, step))
    config = configured(place, store.name, TOPOLOGIES[1], "full")
    code, said = run_ranks(config, store, 2, how, step)
    assert code == 1 and f"step_{step}: could not be saved: rank 1: " in said and "No space left" in said, said
    (folder,) = store.glob("runs/*/checkpoints")
    assert not (folder / f"step_{step}" / "manifest.json").exists()
    assert (folder / f"step_{step - 1}" / "manifest.json").exists()
    assert not list(store.glob("runs/*/export"))
    code, said = run_ranks(config, store, 2)
    assert code == 0 and "resumed from" in said, said
    assert [r.loss for r in lines(place, store.name)] == pytest.approx(
        [r.loss for r in lines(place, unbroken["full"])], rel=1e-4
    )
