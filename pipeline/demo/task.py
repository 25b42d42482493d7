"""Which number is larger: generated preference sources whose loss densities differ, and a tokenizer for them.

Every unordered pair of two-digit numbers is asked about once, in one order, by one source. Pairs that are held out by
their prompt are therefore pairs of numbers that training never saw, not even the other way round. A third set of pairs
is for the base model alone (`pipeline.demo.base`). Everything is a function of the seed; files that are as they should
be are left alone.
"""

import json
import random
from collections.abc import Iterable, Iterator
from pathlib import Path

SHORT = "Which is larger, {a} or {b}?"
WORDY = (
    "Look at both numbers with care, digit by digit, and then tell me in one short sentence which of the two is "
    "larger: {a} or {b}?"
)
PROMPTS = {"short": SHORT, "wordy": WORDY}
PAIRS = 3000
"""Pairs of numbers that the sources share between them; the 1005 others are the base model's."""

END, START, STOP = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
CHATML = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
VOCABULARY = 400


def write_task(folder: Path, seed: int) -> None:
    """Write the sources, the base model's pairs and the tokenizer below `folder`."""
    rng = random.Random(seed)
    numbers = [(a, b) for a in range(10, 100) for b in range(a + 1, 100)]
    rng.shuffle(numbers)
    names = list(PROMPTS)
    for i, name in enumerate(names):
        own = [rng.sample(pair, 2) for pair in numbers[i : PAIRS : len(names)]]
        put(folder / f"{name}.jsonl", lines(row(PROMPTS[name], a, b) for a, b in own))
    undecided = list(coin_flips(numbers[PAIRS:]))
    rng.shuffle(undecided)
    put(folder / "undecided.jsonl", lines(undecided))
    write_tokenizer(folder / "tokenizer")


def row(prompt: str, a: int, b: int) -> dict[str, str]:
    """One pair: the larger number is the right answer."""
    right, wrong = (f"{number} is larger." for number in (max(a, b), min(a, b)))
    return {"prompt": prompt.format(a=a, b=b), "chosen": right, "rejected": wrong}


def coin_flips(numbers: Iterable[tuple[int, int]]) -> Iterator[dict[str, str]]:
    """Every question in both orders and wordings, each once with the right and once with the wrong answer chosen."""
    for small, large in numbers:
        for a, b in ((small, large), (large, small)):
            for prompt in PROMPTS.values():
                right = row(prompt, a, b)
                yield right
                yield {**right, "chosen": right["rejected"], "rejected": right["chosen"]}


def write_tokenizer(folder: Path) -> None:
    """A byte-level BPE over the task's words, with digits split, and a ChatML template."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[END, START, STOP],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    words = [*PROMPTS.values(), "52 is larger.", "system\nuser\nassistant\n"]
    tokenizer.train_from_iterator(words * 10, trainer)
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": STOP, "pad_token": END}
    put(folder / "tokenizer.json", tokenizer.to_str(pretty=True))
    put(folder / "tokenizer_config.json", json.dumps({**settings, "chat_template": CHATML}, indent=1))


def lines(rows: Iterable[dict[str, str]]) -> str:
    """JSON lines."""
    return "".join(json.dumps(row) + "\n" for row in rows)


def put(path: Path, text: str) -> None:
    """Make a file hold this text, whole or not at all."""
    if path.exists() and path.read_text(encoding="utf-8") == text:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    staging = path.with_name(f".{path.name}")
    staging.write_text(text, encoding="utf-8")
    staging.replace(path)
