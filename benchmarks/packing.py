"""How full are packs, how even are ranks, and what does it cost to plan ten million pairs?

    python -m benchmarks.packing [--pairs 10000000]

Lengths: real preference pairs (the ShareGPT sets below PAIRLEDGER_TEST_DATA, Qwen3 tokens, ChatML) drawn with
replacement to 20,000; without that folder, log-normal ones. The ten million are drawn from the same. Prints, and writes
benchmarks/results/packing_HARDWARE_YYYYMM.md.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa

from benchmarks.measure import report
from training.config import DataConfig, PlanConfig, Topology
from training.data.packing import predict
from training.data.plan import StepPlan, make_plan, read_plan, write_plan

PACK_TOKENS = 4096


@dataclass(frozen=True)
class Lengths:
    """A dataset of lengths alone, in shards of 100,000 pairs."""

    pairs: np.ndarray  # int[n, 3]: prompt, chosen, rejected
    fingerprint: str = "ds1:benchmark"
    max_tokens: int = PACK_TOKENS // 2

    @property
    def inputs(self) -> dict[str, str]:
        """None of a dataset's other inputs matter here."""
        return {}

    def columns(self) -> Any:
        """The columns a plan is made from, with ids as long as real ones."""
        n = len(self.pairs)
        prompt, chosen, rejected = np.ascontiguousarray(self.pairs.T, np.int32)
        hex_digits = np.frombuffer(b"0123456789abcdef", np.uint8)
        shards = [np.arange(start, min(start + 100_000, n)) for start in range(0, n, 100_000)]
        ids: list[pa.Array] = []
        for rows in shards:
            text = np.empty((len(rows), 38), np.uint8)
            text[:, :6] = np.frombuffer(b"pair1:", np.uint8)
            text[:, 6:] = hex_digits[np.random.default_rng(rows[0]).integers(0, 16, (len(rows), 32))]
            offsets = np.arange(0, 38 * (len(rows) + 1), 38, dtype=np.int32)
            ids.append(pa.StringArray.from_buffers(len(rows), pa.py_buffer(offsets), pa.py_buffer(text)))
        return SimpleNamespace(
            shard=np.repeat(np.arange(len(shards), dtype=np.int32), [len(rows) for rows in shards]),
            row=np.concatenate([rows - rows[0] for rows in shards]).astype(np.int32),
            prompt=prompt,
            chosen=chosen,
            rejected=rejected,
            chosen_loss=chosen,
            rejected_loss=rejected,
            source_code=np.zeros(n, np.int32),
            sources=("benchmark",),
            pair_id=pa.chunked_array(ids),
            prompt_key=np.arange(n, dtype=np.uint64),
            locator=pa.nulls(n, pa.string()),
        )


def real_lengths() -> tuple[str, np.ndarray]:
    """Where the lengths are from, and int[n, 3] of the pairs that fit a pack."""
    folder = os.environ.get("PAIRLEDGER_TEST_DATA")
    if not folder:
        rng = np.random.default_rng(0)
        columns = [rng.lognormal(np.log(m), s, 2000) for m, s in ((100, 1.0), (250, 0.7), (220, 0.7))]
        return "log-normal", np.clip(np.stack(columns, 1), 1, 1300).astype(int)
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(f"{folder}/tokenizers/qwen3/tokenizer.json")

    def length(text: str) -> int:
        return len(tokenizer.encode(text, add_special_tokens=False).ids)

    roles = {"human": "user", "gpt": "assistant", "system": "system"}
    found: list[tuple[int, int, int]] = []
    for name in ("sharegpt_dpo_en.json", "sharegpt_dpo_zh.json"):
        for row in json.loads(Path(folder, "data", name).read_text(encoding="utf-8")):
            turns = [f"<|im_start|>{roles[t['from']]}\n{t['value']}<|im_end|>\n" for t in row["conversations"]]
            prompt = length("".join(turns) + "<|im_start|>assistant\n")
            found.append((prompt, *(length(row[side]["value"] + "<|im_end|>") for side in ("chosen", "rejected"))))
    lengths = np.array(found)
    return "sharegpt_dpo_en and _zh, Qwen3 tokens", lengths[lengths.sum(1) <= PACK_TOKENS]


def planned(lengths: np.ndarray, pairs_per_step: int) -> StepPlan:
    """A plan over pairs of these lengths."""
    return make_plan([Lengths(lengths)], DataConfig(), PlanConfig(pairs_per_step=pairs_per_step))


def fills(lengths: np.ndarray) -> list[str]:
    """How full and how even steps of several sizes are on one rank and on eight."""
    lines = [
        "| ranks | pairs a step | steps | fill of the epoch | mean step | mean full step | bound on it | "
        "packs a rank | cost max/mean | worst full step |",
        "|-:|-:|-:|-:|-:|-:|-:|-:|-:|-:|",
    ]
    for ranks, pairs_per_step in ((1, 64), (1, 512), (1, 4096), (8, 64), (8, 512)):
        plan = planned(lengths, pairs_per_step)
        table = predict(plan, epochs=1, topology=Topology(dp_shard=ranks), pack_tokens=PACK_TOKENS, layout="shared")
        source, window, pairs, packs, balance = (
            table[name].to_numpy()
            for name in ("source_tokens", "window_tokens", "pairs", "packs", "cost_max_over_mean")
        )
        fill, whole = source / window, pairs == pairs_per_step
        rows = -(-source // PACK_TOKENS)
        best = source / (-(-rows // ranks) * ranks * PACK_TOKENS)
        lines.append(
            f"| {ranks} | {pairs_per_step} | {len(table)} | {source.sum() / window.sum():.2%} | {fill.mean():.2%} | "
            f"{fill[whole].mean():.2%} | {best[whole].mean():.2%} | {(packs / ranks).mean():.1f} | "
            f"{balance.mean():.4f} | {balance[whole].max():.4f} |"
        )
    return lines


def planning(lengths: np.ndarray, pairs: int) -> list[str]:
    """Seconds and peak memory of every stage of planning so many pairs."""
    drawn = lengths[np.random.default_rng(1).integers(0, len(lengths), pairs)].astype(np.int32)
    lines = [f"{pairs:,} pairs, 512 a step, packs of {PACK_TOKENS}:", "", "| stage | seconds | peak GB |", "|-|-:|-:|"]
    started = time.perf_counter()

    def stage(name: str) -> None:
        nonlocal started
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
        lines.append(f"| {name} | {time.perf_counter() - started:.1f} | {peak:.2f} |")
        started = time.perf_counter()

    dataset = Lengths(drawn)
    columns = dataset.columns()
    object.__setattr__(dataset, "columns", lambda: columns)
    stage("(making the input)")
    plan = make_plan([dataset], DataConfig(held_out_share=0.01), PlanConfig(pairs_per_step=512))
    stage("make_plan")
    plan.epoch(0)
    stage("order of an epoch")
    with tempfile.TemporaryDirectory() as folder:
        write_plan(plan, Path(folder))
        stage("write_plan")
        plan = read_plan(Path(folder))
        stage("read_plan")
        predict(plan, epochs=1, topology=Topology(), pack_tokens=PACK_TOKENS, layout="shared")
        stage("predict, 1 rank")
        predict(plan, epochs=1, topology=Topology(dp_shard=8), pack_tokens=PACK_TOKENS, layout="shared")
        stage("predict, 8 ranks")
    return lines


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=10_000_000, help="pairs of the planning measurement")
    pairs = parser.parse_args().pairs
    where, lengths = real_lengths()
    many = lengths[np.random.default_rng(0).integers(0, len(lengths), 20_000)]
    lines = [
        "# Packing and planning",
        "",
        report.setting(("numpy", "pyarrow")),
        "",
        f"Lengths: {where}; {len(lengths)} pairs, mean {lengths.sum(1).mean():.0f} tokens in the shared layout, drawn "
        f"with replacement to {len(many):,}. Packs of {PACK_TOKENS} tokens. The last step is shorter. The bound is "
        "that of full steps: packs are whole, and every rank has as many.",
        "",
        *fills(many),
        "",
        *planning(lengths, pairs),
    ]
    report.write("packing", lines)


if __name__ == "__main__":
    main()
