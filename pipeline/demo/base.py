"""The demonstration's base model: it writes the sentence, and is right half of the time.

    python -m pipeline.demo.base FOLDER SEED

A model of 0.34M parameters, drawn at random, is trained by the trainer itself on questions of which each stands with
the right and with the wrong answer chosen: the fine-tuning term teaches the sentence and to copy a number, the
preference term cancels. Nothing here says which number is larger. Twenty-five seconds of one core; a killed run
continues, a finished one is found again.
"""

import logging
import shutil
import sys
from pathlib import Path

from training.config import RunConfig, parse
from training.data.prepare import prepare
from training.data.sources import SourceSpec
from training.data.tokenizer import Tokenizer, load_tokenizer
from training.run import run_training

RUN = {
    "plan": {"pairs_per_step": 32, "pack_tokens": 1024},
    "objective": {"losses": {"sigmoid": 0.1}, "beta": 0.1, "sft_weight": 1.0, "reference": "none"},
    "optimizer": {"lr": 4e-3, "betas": [0.9, 0.98], "weight_decay": 0.01, "warmup_steps": 20, "schedule": "linear"},
    "devices": {"kind": "cpu"},
    "save": {"steps": 80},
}


def make(folder: Path, seed: int) -> Path:
    """Make `folder/base` from `folder/undecided.jsonl` and `folder/tokenizer`; everything else lies in `base.work`."""
    work = folder / "base.work"
    spec = SourceSpec(name="undecided", inputs=(str(folder / "undecided.jsonl"),))
    prepare(spec, folder / "tokenizer", work / "prepared", workers=1)
    random_model(work / "random", load_tokenizer(folder / "tokenizer"), seed)
    sections = {"data": {"datasets": [str(work / "prepared")]}, "model": {"path": str(work / "random")}}
    config = parse({**RUN, **sections}, RunConfig, where="the base model's run")
    result = run_training(config, work)
    assert result.export is not None, "a run that is not stopped ends with an export"
    staging, base = folder / ".base", folder / "base"
    for place in (staging, base):
        shutil.rmtree(place, ignore_errors=True)
    shutil.copytree(result.export, staging)
    return staging.rename(base)


def random_model(folder: Path, tokenizer: Tokenizer, seed: int) -> None:
    """A small Qwen3. Its weights are drawn wider than usual: copying is then learned in half the steps."""
    from transformers import Qwen3Config, Qwen3ForCausalLM, set_seed

    set_seed(seed)
    config = Qwen3Config(
        vocab_size=tokenizer.vocab_size,
        eos_token_id=tokenizer.eos_id,
        pad_token_id=tokenizer.pad_id,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=256,
        tie_word_embeddings=True,
        initializer_range=0.05,
    )
    Qwen3ForCausalLM(config).save_pretrained(folder)


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stdout)
    make(Path(sys.argv[1]), int(sys.argv[2]))
