"""Where a run stopped, how, and where it goes on: the ledger and the weights are those of the unbroken run."""

import itertools
import random
import signal
from pathlib import Path

import pytest
from safetensors.torch import load_file

from tests.pipeline.forked import flattened, run_ranks
from tests.pipeline.test_ranks import RUN, lines, place

pytestmark = pytest.mark.distributed
__all__ = ["place"]

STEPS = range(1, 7)
"""Twenty pairs, eight a step, two epochs: the third step of an epoch has four."""
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
    step, how, before, after, weights = case
    store = flattened(case)
    code, said = run_ranks(configured(place, store, before, weights), place / store, before[0], how, step)
    assert code == (0 if how == "term" and step == STEPS[-1] else EXITS.get(how, -signal.SIGKILL)), said
    code, said = run_ranks(configured(place, store, after, weights), place / store, after[0])
    assert code == 0, said
    exact = before == after == TOPOLOGIES[0]
    whole, made = lines(place, unbroken), lines(place, store)
    assert [record.step for record in made] == list(STEPS)
    for a, b in zip(whole, made, strict=True):
        assert a.counters and b.counters
        assert sorted(p.row for p in a.pairs) == sorted(p.row for p in b.pairs)
        assert (a.counters.source_tokens, a.counters.loss_tokens) == (b.counters.source_tokens, b.counters.loss_tokens)
        assert b.loss == a.loss if exact else b.loss == pytest.approx(a.loss, rel=1e-4)
    (mine,), (theirs,) = ((place / name).glob("runs/*/export/model.safetensors") for name in (store, unbroken))
    left, right = load_file(mine), load_file(theirs)
    assert left.keys() == right.keys() and len(left) > 10
    for name, tensor in right.items():
        distance = float((left[name] - tensor).norm() / tensor.norm())
        assert distance == 0 if exact else distance < 1e-4, (name, distance)
