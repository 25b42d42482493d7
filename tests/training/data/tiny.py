"""Tiny tokenizers of every make, chat templates of every habit, and pairs in few words."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from training.data.pair import Message, Pair, make_pair

CORPUS = [
    "price $46 as of today, price $5 as of now, $46 $46 $46",
    "user system assistant tool user assistant obey print hello the answer is no",
    "Which river? The Ebro. The Tajo. 1 2 3 4 5 6 7 8 9 0 think easy",
] * 4
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<s>", "</s>")
PLAIN_ADDED = ("<think>", "</think>")

CHATML = """{% for m in messages %}<|im_start|>{{ m.role }}
{{ m.content }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
WITH_BOS = """{{ bos_token }}{% for m in messages %}<|{{ m['role'] }}|>
{{ m['content'] }}{{ eos_token }}
{% endfor %}{% if add_generation_prompt %}<|assistant|>
{% endif %}"""
DROPS_OLD_THOUGHTS = (
    "{% for m in messages %}<|im_start|>{{m.role}}\n{% if m.role=='assistant' and not loop.last %}"
    "{{ m.content.split('</think>')[-1] }}{% else %}{{ m.content }}{% endif %}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
OPENS_THINK = (
    "{% for m in messages %}<|{{m.role}}|>{{m.content}}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|><think>\n{% endif %}"
)
ASKS_FOR_DATE = (
    "Today is {{ strftime_now('%Y-%m-%d') }}.{% for m in messages %}<|{{m.role}}|>{{m.content}}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def byte_level(*, prefix_space: bool = False, adds_bos: bool = False) -> Tokenizer:
    """A byte-level BPE whose merges hold ` $`."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=prefix_space)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=400, show_progress=False, initial_alphabet=alphabet)
    return _finish(tokenizer, trainer, adds_bos)


def metaspace(scheme: str = "first") -> Tokenizer:
    """A BPE in which a blank is `▁`, with one more put in front by `scheme`."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme)
    tokenizer.decoder = decoders.Metaspace(prepend_scheme=scheme)
    trainer = trainers.BpeTrainer(vocab_size=300, show_progress=False, special_tokens=["<unk>"])
    return _finish(tokenizer, trainer, False)


def prepending() -> Tokenizer:
    """A BPE of the older Llama make: the normalizer puts `▁` in front of every text."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("▁+[^▁]*"), "isolated")
    tokenizer.decoder = decoders.Replace("▁", " ")
    trainer = trainers.BpeTrainer(vocab_size=300, show_progress=False, special_tokens=["<unk>"])
    return _finish(tokenizer, trainer, False)


def words(vocabulary: Sequence[str]) -> Tokenizer:
    """One id a word, in the order given, then the added tokens."""
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(("<unk>", *vocabulary))}, "<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens([AddedToken(token, normalized=False) for token in SPECIAL])
    return tokenizer


def _finish(tokenizer: Tokenizer, trainer: Any, adds_bos: bool) -> Tokenizer:
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_special_tokens([AddedToken(token, normalized=False) for token in SPECIAL])
    tokenizer.add_tokens([AddedToken(token, normalized=False) for token in PLAIN_ADDED])
    if adds_bos:
        bos = tokenizer.token_to_id("<s>")
        tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", bos)])
    return tokenizer


def write(folder: Path, tokenizer: Tokenizer, template: str | None = None, **config: Any) -> Path:
    """Save a tokenizer folder; `config` goes into tokenizer_config.json."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    stored = {"eos_token": "<|im_end|>", **({} if template is None else {"chat_template": template}), **config}
    (folder / "tokenizer_config.json").write_text(json.dumps(stored), encoding="utf-8")
    return folder


def turns(*spoken: str) -> tuple[Message, ...]:
    """Messages from `u: text`, `a: text`, `s: text` and `t: text`."""
    roles = {"u": "user", "a": "assistant", "s": "system", "t": "tool"}
    return tuple(Message(role=roles[said[0]], content=said[3:]) for said in spoken)


def pair(prompt: Sequence[str], chosen: Sequence[str], rejected: Sequence[str], **fields: Any) -> Pair:
    """A pair from turns written as `turns` takes them."""
    place = {"source": "tiny", "locator": "tiny.jsonl:1", **fields}
    made = make_pair(turns(*prompt), turns(*chosen), turns(*rejected), **place)
    assert isinstance(made, Pair), made
    return made
