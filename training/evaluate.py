"""Evaluation of a trained model: how it judges held-out pairs, and what it answers.

Judging is teacher-forced: accuracy is the share of pairs whose chosen side has the higher reward, beta times the log
ratio to the reference, strictly; ties are shown apart. A model can win every pair and still write badly, so answers are
generated as well, greedily, by transformers' own code from the exported folder alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from training.config import ObjectiveConfig
from training.errors import InputError, ModelError
from training.geometry import Layout
from training.loss import judge
from training.model import Policy
from training.parallel.device import Device
from training.parallel.mesh import ALONE, World
from training.reference import Floats, score_pairs
from training.step import Numbers, pair_logps

if TYPE_CHECKING:
    from training.data.plan import StepPlan
    from training.data.shards import Dataset
    from training.data.tokenize import TokenizedPair


@dataclass(frozen=True, slots=True, kw_only=True)
class Judgement:
    """Sums over pairs, so that judgements of parts add up: strict wins, ties, rewards, the objective's losses."""

    pairs: int
    wins: int
    ties: int
    chosen_reward_sum: float
    rejected_reward_sum: float
    loss_sum: float

    @property
    def accuracy(self) -> float:
        """Share of strict wins."""
        return self.wins / self.pairs

    @property
    def margin(self) -> float:
        """Mean of the chosen less the rejected reward."""
        return (self.chosen_reward_sum - self.rejected_reward_sum) / self.pairs


def held_out_logps(
    policy: Policy,
    plan: StepPlan,
    datasets: Mapping[str, Dataset],
    *,
    layout: Layout,
    precision: str,
    device: Device,
    room: int,
    world: World = ALONE,
) -> Floats:
    """Log-probabilities of a plan's held-out pairs, float32[n, 2] (chosen, rejected); each once on any topology.

    Raises:
        InputError: the plan holds nothing out.
    """
    held, table = plan.held_out, plan.table
    if not len(held):
        raise InputError("the plan holds no pair out; set data.held_out_share to judge a model on pairs it did not see")

    def take(place: int) -> TokenizedPair:
        i = held[place]
        return datasets[table.datasets[table.dataset[i]]].take(int(table.shard[i]), int(table.row[i]))

    tokens = table.tokens(layout)[held].tolist()
    return score_pairs(policy, take, tokens, room=room, layout=layout, precision=precision, device=device, world=world)


def judge_held_out(
    logps: Floats, plan: StepPlan, reference: Floats, objective: ObjectiveConfig
) -> dict[str, Judgement]:
    """Judge held-out pairs by source, with all of them as `""`.

    `logps` is as `held_out_logps` gives them, `reference` float32[2, pairs of the plan's table].
    """
    held, table = plan.held_out, plan.table
    counts = np.stack([table.chosen_loss[held], table.rejected_loss[held]]).astype(np.float32)
    policy, before, tokens = (torch.from_numpy(x) for x in (logps.T.copy(), reference[:, held], counts))
    found = judge(pair_logps(policy.t().reshape(-1), before, tokens), objective)
    columns = torch.stack([found.chosen_reward, found.rejected_reward, found.loss]).double().numpy()
    sources = table.source[held]
    by_source = {table.sources[code]: judgement(*columns[:, sources == code]) for code in np.unique(sources)}
    return {"": judgement(*columns), **by_source}


def judgement(chosen: Numbers, rejected: Numbers, loss: Numbers) -> Judgement:
    """Judge pairs by their rewards and losses, float64[n] each."""
    return Judgement(
        pairs=len(loss),
        wins=int((chosen > rejected).sum()),
        ties=int((chosen == rejected).sum()),
        chosen_reward_sum=float(chosen.sum()),
        rejected_reward_sum=float(rejected.sum()),
        loss_sum=float(loss.sum()),
    )


@torch.no_grad()
def answers(model: Path, prompts: Sequence[str], *, device: Device, max_new_tokens: int = 64) -> list[str]:
    """Greedy answers to prompts, each as a user's turn where the tokenizer has a chat template, else as text.

    Raises:
        ModelError: the folder has no tokenizer or model that transformers loads.
    """
    if not (model / "tokenizer.json").is_file():  # transformers would make an empty tokenizer of nothing
        raise ModelError(f"{model}: has no tokenizer.json, so it cannot answer prompts; name an exported model")
    try:
        tokenizer: Any = AutoTokenizer.from_pretrained(model, local_files_only=True)
        module: Any = AutoModelForCausalLM.from_pretrained(model, local_files_only=True)
    except (OSError, ValueError) as error:
        raise ModelError(f"{model}: cannot be loaded to answer prompts: {error}") from None
    module = module.to(device.torch).eval()
    return [_answer(module, tokenizer, prompt, device, max_new_tokens) for prompt in prompts]


def _answer(module: Any, tokenizer: Any, prompt: str, device: Device, max_new_tokens: int) -> str:
    text = prompt
    if tokenizer.chat_template:
        turns = [{"role": "user", "content": prompt}]
        text = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
    asked = tokenizer(text, add_special_tokens=not tokenizer.chat_template, return_tensors="pt").to(device.torch)
    made = module.generate(
        input_ids=asked["input_ids"],
        attention_mask=asked["attention_mask"],
        max_new_tokens=max_new_tokens,
        do_sample=False,
        pad_token_id=tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id,
    )
    return tokenizer.decode(made[0, asked["input_ids"].shape[1] :], skip_special_tokens=True).strip()
