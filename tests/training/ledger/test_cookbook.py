"""Every query of docs/sql.md, run on the store that fits on a page, with answers worked out by hand."""

from __future__ import annotations

import re
from dataclasses import replace
from datetime import date
from pathlib import Path
from typing import Any

import pytest

from tests.training.ledger import shop
from training.geometry import Counters
from training.ledger.store import load, query

TEXT = (Path(__file__).parents[3] / "docs" / "sql.md").read_text(encoding="utf-8")
QUERIES = dict(re.findall(r"```sql\n-- (\w+)\n(.*?)```", TEXT, flags=re.DOTALL))

# sums over the four steps: window 80, source 60, logical 80, loss 36, wins 6 of 8 pairs
ANSWERS: dict[str, list[tuple[Any, ...]]] = {
    "runs": [
        ("r", "finished", 4, 4, 0, 8, 60 / 80, 36 / 60, 6 / 8, (0.7 + 0.6 + 0.5 + 0.3) / 4),
        ("s", "finished", 4, 4, 1, 6, 45 / 64, 28 / 45, 4 / 6, (0.7 + 0.6 + 0.5) / 3),
    ],
    "fill": [
        (1, 18 / 32, 1.0, 12 / 18, 12 / 18, 18 / 22),
        (2, 12 / 16, 1.0, 6 / 12, 6 / 12, 12 / 18),
        (3, 15 / 16, 1.0, 10 / 15, 10 / 15, 15 / 18),
        (4, 15 / 16, 1.0, 8 / 15, 8 / 15, 15 / 22),
    ],
    "window": [(27 / 32, 16 / 27, 3 / 4, 0.55)],
    # a: rows 0, 2, 2, 0; b: rows 1, 3, 1, 3
    "sources": [
        ("a", 4, 30, 20, 20 / 30, 0.5, 1.0, (0.75 + 0.6 + 0.5 + 0.4) / 4),
        ("b", 4, 30, 16, 16 / 30, 0.5, 0.5, (0.65 + 0.6 + 0.5 + 0.2) / 4),
    ],
    # 1000 FLOPs a token
    "cost": [("a", 30_000.0, 0.5), ("b", 30_000.0, 0.5)],
    # of run s count step 1, 2 and the second step 3: a has 9 + 6 + 6 tokens and 6 + 4 + 4 supervised ones, b has
    # 9 + 6 + 9 and 6 + 2 + 6; the first step 3 had 6 (4) of a and 9 (6) of b
    "wasteful": [
        ("b", 24_000 / 14, 1 - (14 + 6) / (24 + 9), 9_000.0),
        ("a", 21_000 / 14, 1 - (14 + 4) / (21 + 6), 6_000.0),
    ],
    # each of rows 0 to 3 twice: 2 * (10 + 12 + 8) tokens
    "shards": [(shop.DATASET, 0, "shard-00000.arrow", 4, 8, 60, 36 / 60)],
    # fill 0.5625, 0.75, 0.9375, 0.9375; two seconds each
    "rate": [(0.5, 1, 18 / 2), (0.7, 1, 12 / 2), (0.9, 2, 30 / 4)],
    "slowest": [
        (3, 4.0, 0.5, 3.25, 0.25, 15, 6),
        (1, 2.0, 0.5, 1.25, 0.25, 18, 7),
        (2, 2.0, 0.5, 1.25, 0.25, 12, 5),
    ],
    # two seconds a step: 0.5 + 1.25 + 0.25, the 9 s of saving apart; peak 1e6, 1000 FLOPs a token
    "speed": [
        (1, 2.0, 9.0, 6.0, 0.009),
        (2, 2.0, 6.0, 3.0, 0.006),
        (3, 2.0, 7.5, 5.0, 0.0075),
        (4, 2.0, 7.5, 4.0, 0.0075),
    ],
    "pair": [
        (1, 0, 0, "b", "file.jsonl:2", "shard-00000.arrow", 0, 1, 1.5, 0.65),
        (3, 1, 1, "b", "file.jsonl:2", "shard-00000.arrow", 0, 1, 1.5, 0.5),
    ],
    "line": [("r", 1, 0, 0, 1.5), ("r", 3, 1, 1, 1.5), ("s", 1, 0, 0, 1.5), ("s", 3, 1, 1, 1.5)],
    "lineage": [
        (3, 2, "dagster-2", "run1:r", "plan1:p", "mdl1:m", "ref1:f", shop.DATASET, "tok1:t", "tpl1:t", "rec1:r")
    ],
    "wrong": [("pair1:3", -1.5, "file.jsonl", 4)],
    "hardest": [("pair1:1", "file.jsonl:2", 0.5), ("pair1:2", "file.jsonl:3", 0.5)],
    "consumed": [(1, shop.DATASET, 0, "a", 1, 3, 4, 2, 6), (1, shop.DATASET, 0, "b", 1, 1, 5, 3, 6)],
    "seen": [
        ("file.jsonl:1", 2, [1, 4]),
        ("file.jsonl:2", 2, [1, 3]),
        ("file.jsonl:3", 2, [2, 3]),
        ("file.jsonl:4", 2, [2, 4]),
        ("file.jsonl:5", 0, None),
    ],
    "held_out": [(2, "a", 4, 0.75, 0.25, 0.75), (4, "a", 4, 1.0, 0.25, 0.75)],
    "beside": [
        (1, 0.7, 0.7, 0.0, 1.0),
        (2, 0.6, 0.6, 0.0, 1.0),
        (3, 0.5, 0.5, 0.0, 2.0),  # 4 s in run s
        (4, 0.3, None, None, None),
    ],
    "unconsumed": [("a", 1, "file.jsonl:5")],
    "plan": [("equal", 60, 4, 0)],
    "sound": [(0,)],
    "waste": [(1, 3, 2, 15, 2.0)],
    "doubtful": [(4, "rank 1: no labels", 1, 1, 2)],
    # 23:30, 23:50, 0:10, 0:30 in each run
    "days": [(date(2026, 3, 1), 4), (date(2026, 3, 2), 4)],
    "quarantine": [("a", "identical", 1, "file.jsonl:6")],
}


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = shop.make_two_runs(tmp_path_factory.mktemp("store"))
    load(root)
    return root


def test_every_query_has_an_answer() -> None:
    assert len(QUERIES) == TEXT.count("```sql") == len(ANSWERS)
    assert QUERIES.keys() == ANSWERS.keys()


@pytest.mark.parametrize("name", ANSWERS)
def test_the_cookbook_answers(store: Path, name: str) -> None:
    assert query(store, QUERIES[name])[1] == [tuple(map(_near, row)) for row in ANSWERS[name]]


def _near(value: Any) -> Any:
    return pytest.approx(value, rel=1e-12) if isinstance(value, float) else value


def test_work_that_was_thrown_away_and_steps_that_cannot_be_trusted_are_in_the_summary(store: Path) -> None:
    found = "select steps, unknown_steps, nonfinite_steps, wasted_steps, wasted_seconds, attempts, max_loss"
    assert query(store, f"{found} from run_summary where run_id = 's'")[1] == [(4, 1, 1, 1, 2.0, 2, 0.7)]
    assert query(store, f"{found} from run_summary where run_id = 'r'")[1] == [(4, 0, 0, 0, None, 1, 0.7)]


@pytest.mark.parametrize("tokens", [2**24 + 1, 2**31 + 1, 2**53 + 1])
def test_vector_10_steps_of_any_size_stay_exact_in_every_sum(tmp_path: Path, tokens: int) -> None:
    """A float holds none of these, and their sum over the run is exact as well, of the run and of its sources."""
    counters = replace(shop.counters(1), window_tokens=tokens, source_tokens=tokens, loss_tokens=tokens - 2)
    first = shop.step(1, counters=counters)
    big = replace(first, sources=(replace(first.sources[0], source_tokens=tokens, loss_tokens=tokens - 2),))
    shop.train(shop.write_run(tmp_path, predicted=False), [big, replace(big, step=2), shop.step(3)])
    load(tmp_path)
    found = "select step, window_tokens, source_tokens, loss_tokens from current_step order by step"
    assert query(tmp_path, found)[1] == [(n, tokens, tokens, tokens - 2) for n in (1, 2)] + [(3, 16, 15, 10)]
    assert query(tmp_path, "select source_tokens, loss_tokens from run_summary")[1] == [
        (2 * tokens + 15, 2 * tokens - 4 + 10)
    ]
    by_source = "select source, source_tokens, loss_tokens from source_density order by source"
    assert query(tmp_path, by_source)[1] == [("a", 2 * tokens + 6, 2 * tokens - 4 + 4), ("b", 9, 6)]


def test_case_metrics_summed_and_case_metrics_rank0(tmp_path: Path) -> None:
    """Four microbatches with accuracy 1, 0, 1, 1 are 0.75, and four ranks with 1, 0, 0, 1 are 0.5: sums and counts."""
    run_dir = shop.write_run(tmp_path, predicted=False)
    counters = replace(shop.counters(1), pairs=4)
    shop.train(run_dir, [shop.step(1, counters=counters, wins=3), shop.step(2, counters=counters, wins=2)])
    load(tmp_path)
    assert query(tmp_path, "select step, accuracy, pairs from step_rates order by step")[1] == [
        (1, 0.75, 4),
        (2, 0.5, 4),
    ]
    assert query(tmp_path, "select accuracy from run_summary")[1] == [(5 / 8,)]


def test_vector_23_the_last_step_weighs_what_it_holds(tmp_path: Path) -> None:
    """Five pairs in steps of 2, 2 and 1: accuracy and loss are over five pairs, not over three steps."""
    run_dir = shop.write_run(tmp_path, predicted=False)
    held = {1: (2, 0.5, 2), 2: (2, 0.5, 2), 3: (1, 1.0, 0)}
    steps = [
        shop.step(number, counters=replace(shop.counters(1), pairs=pairs), loss=loss, wins=wins)
        for number, (pairs, loss, wins) in held.items()
    ]
    shop.train(run_dir, steps)
    load(tmp_path)
    assert query(tmp_path, "select accuracy, mean_loss, pairs from run_summary")[1] == [(0.8, 0.6, 5)]


def test_shares_of_nothing_are_unknown_not_infinite(tmp_path: Path) -> None:
    run_dir = shop.write_run(tmp_path, predicted=False)
    shop.train(run_dir, [shop.step(1, counters=Counters(), data_s=0.0, compute_s=0.0, optimizer_s=0.0)])
    load(tmp_path)
    shares = "pack_fill, source_fill, loss_density, loss_fill, sharing, accuracy, source_tokens_per_s, mfu"
    assert query(tmp_path, f"select {shares} from step_rates")[1] == [(None,) * 8]
